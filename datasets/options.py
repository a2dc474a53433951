"""Options of the commands that judge and make tables: by what terms (job_tasks.py)."""

from typing import Annotated

import typer

#: Whose time tables shorten, and by how much a call may be slower for it.
Objective = Annotated[str, typer.Option(metavar="call|job", help="Whose time: the step's is job.")]
SlackShare = Annotated[str | None, typer.Option("--slack", help="Loss for fewer channels: 5%.")]
Hidden = Annotated[str | None, typer.Option(metavar="all|DATA", help="Calls beside compute.")]
MaxChannels = Annotated[int | None, typer.Option(min=1, help="Most channels of any answer.")]
SmPrice = Annotated[float, typer.Option(min=0, max=3, help="Percent lost to a channel at most.")]
