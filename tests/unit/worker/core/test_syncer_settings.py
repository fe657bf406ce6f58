"""The settings of a Welcome, whatever a syncer writes into it."""

from __future__ import annotations

import json
import re

import pytest

from diloco_protocol.spec.job import SyncerSettings
from diloco_protocol.spec.load import parse_job
from diloco_worker.core.syncer_settings import read_settings
from wrong_jobs import local_job

TEXT = SyncerSettings.of(parse_job(json.dumps(local_job({}))).spec).model_dump_json()


@pytest.mark.promise("Nonsensical settings from a syncer end no learner", section="Hostile callers")
@pytest.mark.parametrize("value", ["1e999", "-1e999", "NaN", '"a"', "9" * 5000, "[" * 100_000, "{}"])
@pytest.mark.parametrize("field", ["learners", "every", "steps", "factor"])
def test_settings_that_make_no_sense_are_not_used_and_end_nobody(field: str, value: str) -> None:
    assert read_settings(TEXT) is not None and read_settings("") is None
    said, count = re.subn(rf'"{field}":[^,}}]+', f'"{field}":{value}', TEXT, count=1)
    assert count == 1 and read_settings(said) is None
