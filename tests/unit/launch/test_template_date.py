"""The date that chat templates write is that of a run's first start."""

import datetime
import json

from siirl.checkpoint.files import EXTRA_FILE
from siirl.config import load_config
from siirl.launch import preflight


def date_of(*overrides: str) -> str | None:
    return preflight.with_template_date(load_config(list(overrides))).data.template_date


def test_a_run_has_the_date_of_today_or_the_one_that_is_set(tmp_path):
    folder = f"trainer.output_dir={tmp_path}"
    assert date_of(folder) == datetime.date.today().isoformat()
    assert date_of(folder, "data.template_date=2020-02-29") == "2020-02-29"


def test_a_run_that_goes_on_keeps_the_date_of_its_first_start(tmp_path, monkeypatch):
    (tmp_path / EXTRA_FILE).write_text(json.dumps({"template_date": "2019-12-31"}))
    monkeypatch.setattr(preflight, "newest_complete", lambda root, contents: tmp_path)
    folder = f"trainer.output_dir={tmp_path}"
    assert date_of(folder, "trainer.resume_mode=auto") == "2019-12-31"
    assert date_of(folder, "trainer.resume_mode=auto", "data.template_date=2020-02-29") == "2020-02-29"
    assert date_of(folder, "trainer.resume_mode=disable") == datetime.date.today().isoformat()
