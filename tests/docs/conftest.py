from tests.support.server_fixtures import (  # noqa: F401
    backdoor,
    browser,
    door,
    either_shop,
    http,
    ledger,
    ledger_url,
    open_door,
    queue,
    served,
    shop,
    stand,
)
