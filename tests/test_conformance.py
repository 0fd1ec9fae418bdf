"""The kit over every registered trainer, and the kit itself."""

from __future__ import annotations

import pytest

import trainkit
from trainkit.errors import ConfigError
from trainkit.testing import check_trainer, conformance
from trainkit.testing.conformance import Case, Subject, checks_for

CASES = [Case(each, Subject(name)) for name in trainkit.available_trainers() for each in checks_for(Subject(name))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.subject.name}-{case.check.name}")
def test_every_trainer_conforms(case: Case) -> None:
    case()


@pytest.mark.parametrize("check", conformance.all_checks().values(), ids=lambda check: check.name)
def test_every_check_says_what_it_proves_and_why_it_matters(check: conformance.Check) -> None:
    assert check.proves.endswith((".", "?"))
    assert len(check.matters) > 20


def test_a_check_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the check 'mask_low' is no check; did you mean 'mask_law'\?"):
        check_trainer("sft", expected_failures={"mask_low": "a slip"})
