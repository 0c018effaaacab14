"""A sample of the damage that reproduce/corruptions.py does to checkpoints, each kind to each file once or less."""

from reproduce.corruptions import all_cases, run

N_CASES = 60


def test_damage_is_refused_or_harmless_or_inside_tensor_data():
    cases = list(all_cases(repeats=1))
    sample = cases[:: len(cases) // N_CASES]
    assert {case.folder for case in sample} == {case.folder for case in cases}
    results = run(sample, seed=0)
    assert [(case, seen) for case, seen in results if not case.allows(seen)] == []
    assert {seen for case, seen in results if case.manifest} == {"refused"}
