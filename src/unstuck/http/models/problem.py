"""What every error is told as."""

from pydantic import ConfigDict, Field

from unstuck.http.models.base import Given


class WrongPlace(Given):
    where: str
    what: str


class ProblemDetails(Given):
    """A problem by RFC 9457. Further members say more where there is more to say."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(examples=["urn:unstuck:problem:not_found"])
    title: str
    status: int = Field(examples=[404])
    code: str = Field(description="For programs; stable.", examples=["not_found"])
    detail: str = Field(description="What happened, for people.")
    cure: str = Field(description="What to do about it.")
    errors: list[WrongPlace] = Field(default=[], description="Which parts of the request are wrong.")
