from tests.support.server_fixtures import (  # noqa: F401
    browser,
    door,
    either_shop,
    forker,
    http,
    ledger,
    open_door,
    queue,
    served,
    shop,
    stand,
)
