"""The typer commands, one noun a file: they parse, call the library and show what it yields."""
