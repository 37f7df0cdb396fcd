"""What models of every kind have of test_oracle.py."""

from test_oracle import (  # noqa: F401
    off,
    on,
    test_abort_at_every_stage,
    test_conversations_through_the_router,
    test_conversations_with_the_flag,
    test_conversations_without_the_flag,
    test_every_hit_length,
    test_many_clients_with_one_new_prefix,
)
