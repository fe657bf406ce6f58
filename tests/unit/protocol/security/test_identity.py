"""Names in certificates: which are understood, and who is believed by whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol.security import identity
from diloco_protocol.security.identity import NO_NAMES, IdentityError, Name, name, names_in, parse

LABEL = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,10}[a-z0-9])?", fullmatch=True)
NAMES = st.one_of(
    st.builds(lambda ns, job: name(ns, job, "syncer"), LABEL, LABEL),
    st.builds(lambda ns, job, region: name(ns, job, "learner", region), LABEL, LABEL, LABEL | st.just("")),
)
SYNCER = name("ns", "tiny", "syncer")
EU, ANY = name("ns", "tiny", "learner", "eu-1"), name("ns", "tiny", "learner")


@given(NAMES)
def test_a_name_is_what_its_uri_says(one: Name) -> None:
    assert parse(one.uri) == one and names_in(["spiffe://other/x", one.uri]) == {one}


def test_the_uris_are_those_of_the_manual() -> None:
    assert SYNCER.uri == "diloco://job/ns/tiny/syncer"
    assert EU.uri == "diloco://job/ns/tiny/learner/eu-1" and ANY.uri == "diloco://job/ns/tiny/learner"


@pytest.mark.parametrize(
    "uri",
    [
        "diloco://job/ns/tiny",
        "diloco://job/ns/tiny/syncer/eu-1",
        "diloco://job/ns/tiny/admin",
        "diloco:",
        "diloco://job/ns/tiny/learner/eu-1/x",
        "diloco://job/ns/tiny/learner/",
        "diloco://job//tiny/syncer",
        "diloco://job/NS/tiny/syncer",
        "diloco://job/ns/tiny/learner/eu_1",
        "DILOCO://job/ns/tiny/syncer",
        "diloco://job/ns/tiny/syncer\n",
        "diloco://job/" + "n" * 64 + "/tiny/syncer",
    ],
)
def test_a_malformed_name_is_an_error_and_not_nobody(uri: str) -> None:
    with pytest.raises(IdentityError):
        names_in([uri])


def test_one_certificate_has_one_role() -> None:
    with pytest.raises(IdentityError, match="a certificate of its own"):
        names_in([SYNCER.uri, EU.uri])


@pytest.mark.parametrize(
    ("mine", "theirs", "reason"),
    [
        ({SYNCER}, {EU}, None),
        ({SYNCER}, {ANY}, None),
        ({SYNCER}, {EU, name("ns", "other", "learner")}, None),
        ({SYNCER}, NO_NAMES, "unnamed"),
        ({SYNCER}, {SYNCER}, "wrong-role"),
        ({SYNCER}, {name("ns", "other", "learner", "eu-1")}, "wrong-job"),
        ({SYNCER}, {name("else", "tiny", "learner", "eu-1")}, "wrong-job"),
        (NO_NAMES, NO_NAMES, None),
        (NO_NAMES, {name("else", "tiny", "learner")}, None),
        (NO_NAMES, {name("ns", "other", "learner")}, "wrong-job"),
        (NO_NAMES, {SYNCER}, "wrong-role"),
    ],
)
def test_whom_a_syncer_lets_in(mine: set[Name], theirs: set[Name], reason: str | None) -> None:
    said = identity.check_learner(frozenset(mine), frozenset(theirs), "tiny")
    assert (said and said.reason) == reason


@pytest.mark.parametrize(
    ("mine", "theirs", "reason"),
    [
        ({EU}, {SYNCER}, None),
        ({EU}, {SYNCER, name("ns", "other", "syncer")}, None),
        ({EU}, {EU}, "wrong-role"),
        ({EU}, {ANY}, "wrong-role"),
        ({EU}, NO_NAMES, "unnamed"),
        ({EU}, {name("ns", "other", "syncer")}, "wrong-job"),
        ({EU}, {name("else", "tiny", "syncer")}, "wrong-job"),
        (NO_NAMES, NO_NAMES, None),
    ],
)
def test_which_server_a_learner_believes(mine: set[Name], theirs: set[Name], reason: str | None) -> None:
    said = identity.check_syncer(frozenset(mine), frozenset(theirs))
    assert (said and said.reason) == reason


def test_ones_own_certificate_must_be_ones_own() -> None:
    assert identity.own_syncer(frozenset({SYNCER}), "tiny") == {SYNCER}
    assert identity.own_syncer(NO_NAMES, "tiny") == NO_NAMES == identity.own_learner(NO_NAMES, "tiny", "eu-1")
    assert identity.own_learner(frozenset({EU}), "tiny", "eu-1") == {EU}
    assert identity.own_learner(frozenset({ANY}), "tiny", "us-2") == {ANY}
    assert identity.own_learner(frozenset({EU}), "tiny", None) == {EU}  # an evaluator
    for names, job in (({EU}, "tiny"), ({SYNCER}, "other")):
        with pytest.raises(IdentityError, match="this is the syncer of job"):
            identity.own_syncer(frozenset(names), job)
    with pytest.raises(IdentityError, match="this is a learner of job 'other'"):
        identity.own_learner(frozenset({EU}), "other", "eu-1")
    with pytest.raises(IdentityError, match="this learner is in region 'us-2'"):
        identity.own_learner(frozenset({EU}), "tiny", "us-2")


@given(st.frozensets(NAMES.filter(lambda one: one.role == "learner"), max_size=3), LABEL)
def test_a_region_is_covered_by_its_own_name_or_by_one_for_all(names: identity.Names, region: str) -> None:
    expected = not names or any(one.region in (region, "") for one in names)
    assert identity.covers(names, region) == expected


def test_a_party_stays_itself_when_its_certificate_changes() -> None:
    us, other = name("ns", "tiny", "learner", "us-2"), name("ns", "other", "learner", "eu-1")
    for before, after, same in (
        ({EU}, {EU}, True),
        ({EU}, {EU, us}, True),
        ({ANY}, {EU}, True),
        (NO_NAMES, NO_NAMES, True),
        ({EU}, {us}, False),
        ({EU}, {other}, False),
        ({EU}, NO_NAMES, False),
        ({ANY}, {other}, False),
    ):
        assert identity.same_party(frozenset(before), frozenset(after)) == same
        assert identity.same_party(frozenset(after), frozenset(before)) == same


def test_a_job_of_another_namespace_is_another_party() -> None:
    one, other = (frozenset({Name(namespace, "j", "learner", "r")}) for namespace in ("a", "b"))
    assert identity.same_party(one, one) and not identity.same_party(one, other)
