"""Keep the tokens of the web door.

On the service lane: every request at the door waits for it, and must not wait for what somebody looks up.
"""

from unstuck.store.postgres import arrays
from unstuck.store.postgres.base import Verbs
from unstuck.store.records import ApiTokenRecord, NewApiToken


class ApiTokenVerbs(Verbs):
    def add_api_token(self, token: NewApiToken) -> None:
        self.serve_once(
            "add_api_token",
            id=token.id,
            name=token.name,
            hash=token.hash,
            seal=token.seal,
            scopes=arrays.texts(token.scopes),
            created_by=token.created_by,
            expires_in_s=token.expires_in_s,
        )

    def api_tokens(self) -> list[ApiTokenRecord]:
        return [ApiTokenRecord(*(*row[:4], tuple(row[4]), *row[5:])) for row in self.serve("api_tokens")]

    def revoke_api_token(self, token_id: str) -> bool:
        return bool(self.serve_once("revoke_api_token", id=token_id))
