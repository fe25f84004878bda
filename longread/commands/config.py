"""`longread config`: the settings in force and where each came from."""

from __future__ import annotations

import typer

from longread.commands import options

app = typer.Typer(help="Settings.", rich_markup_mode=None)


@app.command("show")
def show_config(ctx: typer.Context, as_json: options.Json = False) -> None:
    """Print each setting with its origin; the files that are read stand below."""
    from longread.commands.run import Run, table_lines
    from longread.config import (
        ENV_PREFIX,
        OPTION_NAMES,
        PROJECT_FILE,
        option_value,
        user_config_path,
    )

    run = Run.start(ctx)
    values = {name: option_value(run.settings, name) for name in OPTION_NAMES}
    if as_json:
        record = {
            name: {
                "value": value if isinstance(value, bool | int | float) else str(value),
                "origin": run.origins[name],
            }
            for name, value in values.items()
        }
        run.print_json({"version": 1, "settings": record})
        return
    rows = [(name, _shown(value), run.origins[name]) for name, value in values.items()]
    for line in table_lines(("setting", "value", "origin"), rows):
        run.screen.print(line)
    run.screen.note(
        f"longread: an option wins over {ENV_PREFIX}* variables, these over {PROJECT_FILE} here, "
        f"that over {user_config_path()}"
    )


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
