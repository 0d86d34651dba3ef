from pmlip import datasets
from pmlip_bench.silica.data import SilicaSettings, splits


def test_tuning_does_not_see_what_is_tested_on():
    settings = SilicaSettings(backbone="chgnet", data="silica-pbe-tuning")
    parts = splits(48, settings)
    known = {atoms.info["id"] for part in ("train", "valid") for atoms in datasets.silica_pbe(part)}
    used = [atoms.info["id"] for atoms in parts.everything]
    assert set(used) <= known
    assert len(set(used)) == len(used)
    assert {atoms.info["polymorph"] for atoms in parts.unseen["cristobalite"]} == {"cristobalite"}
    assert {atoms.info["polymorph"] for atoms in (*parts.train, *parts.valid, *parts.test)} == {"quartz"}
