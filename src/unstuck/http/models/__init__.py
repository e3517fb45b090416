"""What the API takes and gives, for OpenAPI.

Answers have the fields of the command line's JSON; they are only added to."""
