"""Whatever reaches a table of the gateway, on PostgreSQL too: every statement is run by one of these."""

from __future__ import annotations

import pytest

from .test_authentication import (
    test_a_credential_lives_until_it_expires_or_is_revoked,
    test_a_password_is_changed_and_other_sessions_end,
    test_a_rotation_keeps_the_old_secret_for_the_overlap,
    test_a_second_factor_is_asked_for_and_each_code_is_good_for_once,
    test_a_second_factor_is_removed_with_a_code_of_it,
    test_a_sign_in_makes_a_new_session_and_ends_the_one_before,
    test_an_eleventh_session_ends_the_oldest,
    test_an_idle_session_ends,
    test_an_invited_person_sets_a_password_with_a_link_that_is_good_for_once,
    test_only_a_digest_of_a_credential_is_kept,
    test_refused_sign_ins_are_in_the_ledger,
    test_the_console_credential_counts_and_the_one_of_an_earlier_start_does_not,
    test_the_owner_link_is_good_for_once,
)
from .test_operations import (
    scheduler,
    test_a_repeat_after_a_lost_answer_carries_the_same_mutation,
    test_keys_are_of_their_actor_and_last_a_day,
    test_the_same_key_and_request_is_done_once,
)

__all__ = [
    "scheduler",
    "test_a_credential_lives_until_it_expires_or_is_revoked",
    "test_a_password_is_changed_and_other_sessions_end",
    "test_a_repeat_after_a_lost_answer_carries_the_same_mutation",
    "test_a_rotation_keeps_the_old_secret_for_the_overlap",
    "test_a_second_factor_is_asked_for_and_each_code_is_good_for_once",
    "test_a_second_factor_is_removed_with_a_code_of_it",
    "test_a_sign_in_makes_a_new_session_and_ends_the_one_before",
    "test_an_eleventh_session_ends_the_oldest",
    "test_an_idle_session_ends",
    "test_an_invited_person_sets_a_password_with_a_link_that_is_good_for_once",
    "test_keys_are_of_their_actor_and_last_a_day",
    "test_only_a_digest_of_a_credential_is_kept",
    "test_refused_sign_ins_are_in_the_ledger",
    "test_the_console_credential_counts_and_the_one_of_an_earlier_start_does_not",
    "test_the_owner_link_is_good_for_once",
    "test_the_same_key_and_request_is_done_once",
]


@pytest.fixture
def dialect() -> str:
    """The other one."""
    return "postgresql"
