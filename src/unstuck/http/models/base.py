"""What every model has in common."""

from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr

DURATION = "A duration like `30s`, `5m`, `1h30m`, or a number of seconds."

Span = Annotated[StrictStr | StrictFloat | StrictInt, Field(description=DURATION, examples=["10m", 30])]
Instant = Annotated[datetime, Field(description="ISO 8601, in UTC.")]
Anything = Annotated[Any, Field(description="Any JSON value.")]


class Asked(BaseModel):
    """A body that comes in: a field that nobody knows is a mistake, and is told."""

    model_config = ConfigDict(extra="forbid")


class Given(BaseModel):
    """A body that goes out. It is written by the views that all doors share; this says what is in it."""
