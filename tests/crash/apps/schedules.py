"""An app with a schedule of one second, for workers that are killed."""

import os

from unstuck import App, Context

app = App()


@app.schedule(every="1s", name="pulse")
@app.task(on_crash="retry")
def tick(ctx: Context) -> str:
    assert ctx.scheduled_for is not None
    with open(os.environ["TICKS_TO"], "a", encoding="utf-8") as file:
        file.write(f"{ctx.job_id} {ctx.scheduled_for.timestamp():.0f}\n")
    return ctx.scheduled_for.isoformat()
