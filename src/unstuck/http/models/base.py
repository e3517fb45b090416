"""What every model has in common."""

from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, model_validator

DURATION = "A duration like `30s`, `5m`, `1h30m`, or a number of seconds."

Span = Annotated[StrictStr | StrictFloat | StrictInt, Field(description=DURATION, examples=["10m", 30])]
Instant = Annotated[datetime, Field(description="ISO 8601, in UTC.")]
Anything = Annotated[Any, Field(description="Any JSON value.")]


MAX_FIELDS = 100
"""No body has as many: complaining of each of 100,000 would take as much memory as all the rest of the request."""


def few_fields(cls: type[BaseModel], value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise ValueError(f"it has {len(value):,} fields; {len(cls.model_fields)} are known")
    return value


class Asked(BaseModel):
    """A body that comes in: a field that nobody knows is a mistake, and is told."""

    model_config = ConfigDict(extra="forbid")

    _few = model_validator(mode="before")(few_fields)


class Given(BaseModel):
    """A body that goes out. It is written by the views that all doors share; this says what is in it."""
