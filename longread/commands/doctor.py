"""`longread doctor`: the checks of `longread.checkup`, printed."""

from __future__ import annotations

import typer

from longread.commands import options


def doctor(
    ctx: typer.Context,
    model: options.Model = None,
    cache_dir: options.CacheDir = None,
    as_json: options.Json = False,
) -> None:
    """Check what works on this machine and what does not, with the remedy; exits with 1 if not."""
    import dataclasses

    from longread.checkup import FAIL, checkup
    from longread.commands.run import Run

    run = Run.start(ctx)
    checks = checkup(run.settings)
    if as_json:
        records = [dataclasses.asdict(check) for check in checks]
        run.print_json({"version": 1, "checks": records})
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            remedy = f"; {check.remedy}" if check.remedy else ""
            run.screen.print(f"{check.status:<4}  {check.name:<{width}}  {check.found}{remedy}")
    if any(check.status == FAIL for check in checks):
        raise typer.Exit(1)
