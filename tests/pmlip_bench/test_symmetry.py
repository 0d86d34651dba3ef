import json

import pytest
from rich.console import Console

import pmlip
from conftest import randomise_noise
from molecules import molecules
from pmlip_bench import symmetry
from pmlip_bench.symmetry import markdown, rotation_errors
from tiny import tiny_backbone


def test_forces_that_turn_along_have_no_error_and_others_do():
    data, model = molecules(3), randomise_noise(pmlip.perturb(tiny_backbone()))
    exact = rotation_errors(model, data)
    assert max(exact["rotation_error"].values()) < 1e-12
    assert exact["spread"] > 1e-4

    def push(module, inputs, outputs):
        """Along x, whatever the structure does."""
        outputs["forces"][:, 0] += 0.3
        return outputs

    model.backbone.register_forward_hook(push)
    pushed = rotation_errors(model, data)["rotation_error"]
    assert 0.05 < pushed["samples"] < 0.5
    assert pushed["samples"] == pytest.approx(pushed["without_noise"])


@pytest.mark.parametrize("fine_tuned", [False, True])
def test_a_result_file_for_random_noise_and_for_a_fine_tuned_model(tmp_path, monkeypatch, fine_tuned):
    backbone = tiny_backbone()
    monkeypatch.setattr(symmetry, "load_backbone", lambda *_, **__: backbone)
    monkeypatch.setattr(symmetry, "silica_pbe", lambda _: molecules_of_quartz())
    randomise_noise(pmlip.perturb(backbone)).save(tmp_path / "model.pt")
    model = tmp_path / "model.pt" if fine_tuned else None
    symmetry.run("tiny", model=model, weights=None, trust=False, out=tmp_path, console=Console(quiet=True))
    record = json.loads((tmp_path / ("tiny-fine-tuned-p.json" if fine_tuned else "tiny.json")).read_text())
    drawn = pmlip.load(tmp_path / "model.pt", backbone=backbone).sample(molecules_of_quartz(), samples=symmetry.SAMPLES)
    of_file = float(drawn.spread.forces.square().mean().sqrt())
    assert record["spread"] == pytest.approx(
        of_file if fine_tuned else symmetry.SPREAD, rel=1e-9 if fine_tuned else 0.2
    )
    name = "tiny, fine-tuned by p" if fine_tuned else "tiny"
    assert markdown([record]).splitlines()[-1].startswith(f"| {name} | ")


def molecules_of_quartz():
    made = molecules(3)
    for atoms in made:
        atoms.info["polymorph"] = "quartz"
    return made
