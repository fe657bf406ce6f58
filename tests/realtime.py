"""Which tests depend on real time: on other programs, sockets with time limits, clusters, and clocks that go on.

A test with the mark ``realtime`` can fail because the machine was busy. All others are deterministic: they use no
clock, or virtual time, and any failure of theirs is a fault. Programs that run to their end and are judged by their
output alone (git, an interpreter) make no test a realtime one, and neither does a port that is merely looked at.

A test of its own may be marked at its definition; the rest is here, as whole folders, files and names are more than
marks that somebody could forget. tests/conftest.py takes the hook.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# A wait's own limits (patience.py) end a test that hangs, and say what it waited for: they have to come first.
TIMEOUT_SECONDS = 900.0

FOLDERS = ("e2e", "integration")
# Below tests/unit, all tests of a file.
FILES = (
    *("bench/test_relay.py", "bench/lab/compare/test_cpu.py", "cli/doctor/test_links.py"),
    *("cli/local/test_run_from_outside.py", "cli/processes/test_launch.py", "cli/test_join_signals.py"),
    *("cli/test_syncer_client.py", "operator/informer/test_reflector.py", "operator/kube/test_api.py"),
    *("operator/leadership/test_candidate.py", "operator/reconcile/test_syncer_poller.py"),
    *("protocol/arrays/test_kernel_cache.py", "protocol/common/test_http_server.py", "protocol/wire/test_bulk.py"),
    *("protocol/wire/test_bulk_calls.py", "protocol/wire/test_byte_stream.py"),
    *("protocol/wire/test_channels.py", "syncer/runtime/test_durability.py", "syncer/runtime/test_runtime.py"),
    *(
        "syncer/runtime/test_traffic.py",
        "syncer/server/test_bulk_server.py",
        "syncer/server/test_shard_connections.py",
        "syncer/server/test_tls_listener.py",
        "syncer/store/test_bucket.py",
    ),
    *(
        "worker/data/test_prefetch.py",
        "worker/group/test_rank_watch.py",
        "worker/net/test_client.py",
        "worker/net/test_routes.py",
        "worker/standalone/test_learner.py",
    ),
    *("worker/test_exit_hooks.py", "worker/test_launch.py", "bench/lab/test_pace.py"),
)
# Of other files, these tests, wherever they are.
NAMES = frozenset(
    {
        # runs and other programs that go on until they are told
        "test_a_reader_that_leaves_changes_no_exit_code",
        "test_a_run_that_goes_on",
        "test_on_a_terminal_without_options_it_asks",
        "test_progress_rises_with_work_and_stands_with_none",
        "test_the_lock_goes_with_the_process",
        "test_token_file_is_made_once_for_all_processes",
        "test_what_is_caught_survives_and_is_known",
        "test_tests_that_do_not_end_or_fail_by_themselves",
        "test_work_counts_and_idling_does_not",
        # who asks somebody that may not answer
        "test_a_hub_that_does_not_answer_is_not_asked_again_and_again",
        "test_a_name_that_does_not_resolve",
        "test_another_jobs_or_roles_certificate_opens_nothing",
        "test_kopf_lists_and_watches_all_other_jobs",
        "test_nobody_answers",
        "test_nothing_listens_there",
        "test_secrets_that_were_made_at_different_times_fit",
        "test_status_of_nothing",
        "test_version_0_is_tried_again_and_then_left_to_another",
        "test_what_answers_and_is_no_syncer_is_told_without_codes",
    }
)


def is_realtime(path: Path, name: str) -> bool:
    """``name``: the test function's."""
    place = path.relative_to(TESTS)
    if place.parts[0] in FOLDERS or name in NAMES:
        return True
    return place.parts[0] == "unit" and place.relative_to("unit").as_posix() in FILES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if TESTS not in item.path.parents:
            continue
        marks = {mark.name for mark in item.iter_markers()}
        if "realtime" not in marks and is_realtime(item.path, getattr(item, "originalname", item.name)):
            item.add_marker(pytest.mark.realtime)
            marks.add("realtime")
        if "realtime" in marks:
            limit = item.get_closest_marker("timeout")
            if limit is None or not limit.args or limit.args[0] < TIMEOUT_SECONDS:
                item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS), append=False)
