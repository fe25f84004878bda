"""Quality: what a selection keeps and what it costs in answers; run by `longread eval`."""
