"""Fine-tuning, on a tiny potential in double precision with random noise weights unless the start is what is tested."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest
import torch
from ase.build import bulk

import pmlip
from molecules import CONFIG, assert_same, model, molecules, state
from pmlip import losses, methods
from pmlip.errors import OutputInUseError
from pmlip.methods.base import Initialisation
from pmlip.noise.draws import SEED_OF_FIT
from pmlip.noise.injection import noisy_layers
from pmlip.structures.labels import fingerprint, labels
from pmlip.training import batches, finetuning
from pmlip.training.distributed import Processes
from pmlip.training.finetuning import finetune
from tiny import tiny_backbone

pytestmark = pytest.mark.usefixtures("quick_energy_zero")


def test_training_lowers_the_score_and_repeats():
    data, results = molecules(), []
    for _ in range(2):
        trained = model()
        before = pmlip.evaluate(trained, data[8:], samples=8)
        done = finetune(trained, data[:8], valid=data[8:], config=replace(CONFIG, epochs=40, seed=3))
        results.append(state(trained))
    after = pmlip.evaluate(trained, data[8:], samples=8)
    assert after.scores["forces"]["crps"] < 0.7 * before.scores["forces"]["crps"]
    assert done.steps == 80
    assert_same(*results)
    assert [line["step"] for line in done.log if "valid" in line] == [27, 54, 80]
    # of the kept weights with the zero of their energies fitted, which leaves forces as they are
    kept = min((line for line in done.log if "valid" in line), key=lambda line: line["valid"])
    assert done.validation["valid_forces"] == pytest.approx(kept["valid_forces"], rel=1e-6)
    drawn = trained.sample(data[8:], samples=16, seed=SEED_OF_FIT)
    expected = float(pmlip.losses.crps_loss(drawn, labels(data[8:])).terms["energy"])
    assert done.validation["valid_energy"] == pytest.approx(expected, rel=1e-6)


def test_energies_per_element_move_into_the_references():
    """The offsets of 100 and 400 eV that no potential could learn are gone before training starts."""
    data, trained = molecules(), model()
    done = finetune(trained, data, config=CONFIG)
    assert done.offsets[14] == pytest.approx(-100, abs=3)
    assert done.offsets[8] == pytest.approx(-400, abs=3)
    error = (trained.predict(data).energy - labels(data).energy).abs() / labels(data).atoms_per_system
    assert float(error.mean()) < 1
    assert done.scales["energy"] < 1


def test_a_frozen_backbone_keeps_its_prediction():
    data, trained = molecules(), model()
    before = trained.predict(data)
    spread = trained.sample(data, samples=4).spread
    done = finetune(trained, data, config=replace(CONFIG, freeze_backbone=True))
    after = trained.predict(data)
    torch.testing.assert_close(after.forces, before.forces, rtol=0, atol=0)
    shift = torch.tensor([sum(done.offsets[int(z)] for z in atoms.numbers) for atoms in data], dtype=torch.float64)
    torch.testing.assert_close(after.energy, before.energy + shift)
    assert not torch.allclose(trained.sample(data, samples=4).spread.forces, spread.forces)
    assert all(parameter.requires_grad for parameter in trained.parameters())


def test_the_log_of_blip_tells_how_uncertain_its_weights_are():
    data, trained = molecules(), methods.make("blip", tiny_backbone(), offset=2.0)
    features = trained.backbone.row_features(trained.backbone.graph(data))
    alphas = torch.cat([values.flatten() for values in trained.posterior.infer(features).values()])
    done = finetune(trained, data, config=replace(CONFIG, epochs=1, batch=len(data)))
    assert done.log[0]["alpha"] == pytest.approx(float(alphas.detach().log().mean().exp()), rel=1e-9)


def test_the_best_weights_are_kept_and_patience_ends_a_run():
    """The training labels have nothing to do with the validation labels, so it soon gets worse."""
    data, others = molecules(8), molecules(4, seed=1)
    for atoms in others:
        atoms.calc.results["forces"] = -atoms.calc.results["forces"]
    config = replace(CONFIG, epochs=60, validations=30, patience=2, noise_rate=0.05, backbone_rate=0.05)
    trained = model()
    done = finetune(trained, data, valid=others, config=config)
    scored = [line["valid"] for line in done.log if "valid" in line]
    assert done.steps < 120
    assert min(scored) < scored[-1]
    loss = pmlip.losses.crps_loss(
        trained.sample(others, samples=16, seed=SEED_OF_FIT),
        labels(others),
        weights={k: 1 / v for k, v in done.scales.items() if k == "forces"},
    )
    best = next(line for line in done.log if line.get("valid") == min(scored))
    assert float(loss.terms["forces"]) == pytest.approx(best["valid_forces"], rel=1e-9)


SCRIPT = """
    import sys, time, torch
    torch.set_num_threads(1)
    import pmlip.training.finetuning
    from molecules import CONFIG, model, molecules
    from pmlip.training.finetuning import finetune
    from pmlip.methods import _energy_zero
    _energy_zero.PAIRS_FOR_SLOPE = _energy_zero.CURVED_DIRECTIONS = 2
    pmlip.training.finetuning.SAVE_EVERY = 0.0
    data, trained = molecules(), model()

    def slowly(step, steps, latest):
        print(step, flush=True)
        if step == 4:
            time.sleep(float(sys.argv[2]))

    finetune(trained, data[:8], valid=data[8:], config=CONFIG, folder=sys.argv[1], progress=slowly)
    trained.save(sys.argv[1] + "/model.pt")
"""


def environment():
    """Of a process that imports the helpers of the tests."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def start(folder, pause):
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True)


def test_a_killed_run_ends_where_an_uninterrupted_one_ends(tmp_path):
    whole = start(tmp_path / "whole", 0)
    killed = start(tmp_path / "killed", 600)
    for line in killed.stdout:
        if int(line) == 4:
            break
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    assert not (tmp_path / "killed" / "model.pt").exists()
    again = start(tmp_path / "killed", 0)
    steps = again.communicate()[0].split()
    assert again.returncode == 0
    assert int(steps[0]) >= 3  # not from the start
    whole.communicate()
    ends = [torch.load(tmp_path / name / "model.pt", weights_only=True)["state"] for name in ("whole", "killed")]
    assert_same(*ends)
    logs = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("whole", "killed")]
    curves = [[{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in log] for log in logs]
    assert curves[0] == curves[1]


def test_an_interrupted_run_saves_where_it_is(tmp_path):
    data, trained = molecules(), model()

    def interrupt(step, steps, latest):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finetune(trained, data, config=CONFIG, folder=tmp_path, progress=interrupt)
    assert torch.load(tmp_path / "last.pt", weights_only=True)["step"] == 3
    assert sorted(file.name for file in tmp_path.iterdir()) == ["last.pt", "log.jsonl"]


def test_an_interruption_within_a_step_waits_for_its_end(tmp_path, monkeypatch):
    data, done = molecules(), []
    step = torch.optim.AdamW.step

    def interrupted(optimizer, *arguments, **named):
        done.append(step(optimizer, *arguments, **named))
        if len(done) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(torch.optim.AdamW, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        finetune(model(), data, config=CONFIG, folder=tmp_path)
    assert torch.load(tmp_path / "last.pt", weights_only=True)["step"] == 3
    resumed, whole = model(), model()
    finetune(resumed, data, config=CONFIG, folder=tmp_path)
    finetune(whole, data, config=CONFIG)
    assert_same(state(resumed), state(whole))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": replace(CONFIG, seed=1)}, r"belongs to a run with other settings \(seed = 0, now 1\)"),
        ({"train": molecules(9)}, "belongs to a run with other training data"),
        ({"model": lambda: pmlip.perturb(tiny_backbone(seed=5))}, "belongs to a run with another model"),
        ({"model": lambda: pmlip.perturb(tiny_backbone(), noise_dim=3)}, "belongs to a run with another model"),
    ],
)
def test_a_folder_belongs_to_one_run(tmp_path, change, message):
    given = {"train": molecules(), "config": CONFIG, "model": lambda: pmlip.perturb(tiny_backbone())}
    finetune(given["model"](), given["train"], config=given["config"], folder=tmp_path)
    given |= change
    with pytest.raises(ValueError, match=message):
        finetune(given["model"](), given["train"], config=given["config"], folder=tmp_path)


def test_a_run_resumes_from_its_initial_weights_alone(tmp_path):
    """The run changes its model, so the same object cannot start it again."""
    first, again = model(), model()
    finetune(first, molecules(), config=CONFIG, folder=tmp_path)
    message = "or other initial weights; to resume it, start from a model with the same initial weights"
    with pytest.raises(ValueError, match=message):
        finetune(first, molecules(), config=CONFIG, folder=tmp_path)
    finetune(again, molecules(), config=CONFIG, folder=tmp_path)
    assert_same(state(again), state(first))


def test_a_folder_belongs_to_a_model_of_one_part_or_of_several(tmp_path):
    short = replace(CONFIG, epochs=1)

    def ensemble():
        return methods.make("ensemble", tiny_backbone(), members=2)

    for first, second in ((model, ensemble), (ensemble, model)):
        folder = tmp_path / first.__name__
        finetune(first(), molecules(8), config=short, folder=folder)
        with pytest.raises(ValueError, match=r"last\.pt belongs to a run with another method; use another folder"):
            finetune(second(), molecules(8), config=short, folder=folder)


def test_a_run_goes_on_after_a_gradient_that_is_no_number(tmp_path, monkeypatch):
    data, backpropagate, calls = molecules(8), losses.backpropagate, []

    def stumbling(predict, noise, loss, **options):
        value = backpropagate(predict, noise, loss, **options)
        calls.append(value)
        if len(calls) == 3:
            tried.noise.w_z.grad.fill_(torch.nan)
        return value

    tried = model()
    monkeypatch.setattr(finetuning, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(losses, "backpropagate", stumbling)
    with pytest.raises(FloatingPointError, match="the gradient of step 3 is NaN or infinite; lower the learning rates"):
        finetune(tried, data, config=CONFIG, folder=tmp_path)
    resumed, whole = model(), model()
    finetune(resumed, data, config=CONFIG, folder=tmp_path)
    finetune(whole, data, config=CONFIG)
    assert_same(state(resumed), state(whole))


@pytest.mark.parametrize(
    ("method", "chunk", "message"),
    [
        (
            "p",
            None,
            "3 samples each does not fit in memory; run the samples one by one with chunk=1, or lower the batch",
        ),
        ("p", 1, "3 samples each does not fit in memory; lower the batch size with batch=..."),
        ("deterministic", None, "1 sample each does not fit in memory; lower the batch size with batch=..."),
    ],
)
def test_a_step_that_does_not_fit_into_memory_says_what_helps(monkeypatch, method, chunk, message):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(losses, "backpropagate", full)
    with pytest.raises(MemoryError, match=re.escape(message)):
        finetune(methods.make(method, tiny_backbone()), molecules(8), config=replace(CONFIG, chunk=chunk))


def test_the_time_of_a_step_does_not_include_gradients_of_frozen_parameters():
    trained, needed = model(), []

    def look(backbone, _):
        if backbone.training:
            needed.append({name for name, parameter in backbone.named_parameters() if parameter.requires_grad})

    trained.backbone.register_forward_pre_hook(look)
    config = replace(CONFIG, freeze_backbone=True)
    assert finetuning.seconds_per_step(trained, molecules(8), config, Processes()) > 0
    assert len(needed) == 2
    assert all(names and all("noise" in name for name in names) for names in needed)


def test_the_state_of_a_run_is_not_taken_for_a_model_nor_from_another_version(tmp_path):
    finetune(model(), molecules(8), config=replace(CONFIG, epochs=1), folder=tmp_path)
    with pytest.raises(pmlip.CheckpointError, match=r"last.pt is the state of a run, not a model"):
        pmlip.load(tmp_path / "last.pt")
    stored = torch.load(tmp_path / "last.pt", weights_only=True)
    torch.save(stored | {"version": 1}, tmp_path / "last.pt")
    with pytest.raises(ValueError, match=r"last.pt was written by another version of pmlip"):
        finetune(model(), molecules(8), config=replace(CONFIG, epochs=1), folder=tmp_path)


def test_a_damaged_state_is_an_error_and_stays(tmp_path):
    (tmp_path / "last.pt").write_bytes(b"half a file")
    with pytest.raises(ValueError, match=r"last.pt is damaged; remove it to start again"):
        finetune(model(), molecules(), config=CONFIG, folder=tmp_path)
    assert (tmp_path / "last.pt").read_bytes() == b"half a file"


DISTRIBUTED = """
    import sys, torch
    torch.set_num_threads(1)
    from pmlip.training.distributed import Processes
    from dataclasses import replace
    from molecules import CONFIG, model, molecules
    from pmlip.methods import _energy_zero
    from pmlip.training.finetuning import finetune
    _energy_zero.PAIRS_FOR_SLOPE = _energy_zero.CURVED_DIRECTIONS = 2
    processes = Processes.start("cpu")
    data, trained = molecules(), model()
    finetune(trained, data[:7], valid=data[7:], config=replace(CONFIG, batch=3), processes=processes)
    forces_alone = replace(CONFIG, epochs=1, energy=0.0)
    done = finetune(model(), data[:7], valid=data[7:8], config=forces_alone, processes=processes)
    assert done.validation["valid"] > 0  # one process had nothing to score
    if processes.rank == 0:
        trained.save(sys.argv[1])
    processes.stop()
"""


def test_only_one_run_writes_a_state(tmp_path):
    def interrupt(step, steps, latest):
        with pytest.raises(OutputInUseError, match=r"last.pt is being written by process \d+ on "):
            finetune(model(), molecules(), config=CONFIG, folder=tmp_path / "run")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finetune(model(), molecules(), config=CONFIG, folder=tmp_path / "run", progress=interrupt)
    assert {file.name for file in (tmp_path / "run").iterdir()} == {"last.pt", "log.jsonl"}


def test_a_run_that_cannot_start_leaves_no_folder(tmp_path):
    plain = methods.make("deterministic", tiny_backbone())
    with pytest.raises(ValueError, match="nothing to train: the backbone is frozen"):
        finetune(plain, molecules(4), config=replace(CONFIG, freeze_backbone=True), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_processes_give_what_one_gives(tmp_path):
    """7 structures in batches of 3: one process has two of them and the other one, and of the last batch none."""
    data, alone = molecules(), model()
    finetune(alone, data[:7], valid=data[7:], config=replace(CONFIG, batch=3))
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(DISTRIBUTED))
    command = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        str(script),
        str(tmp_path / "two.pt"),
    ]
    subprocess.run([sys.executable, *command], env=environment(), check=True, capture_output=True, timeout=600)
    together = torch.load(tmp_path / "two.pt", weights_only=True)["state"]
    assert_same(together, state(alone), rtol=1e-7, atol=1e-9)


def test_memory_of_many_samples_can_be_saved():
    """Chunks of samples change nothing but rounding."""
    data, results = molecules(), []
    for chunk in (None, 1):
        trained = model()
        finetune(trained, data, config=replace(CONFIG, chunk=chunk, epochs=1))
        results.append(state(trained))
    assert_same(*results, rtol=1e-7, atol=1e-8)


def test_missing_labels_are_an_error_unless_allowed():
    data = molecules()
    del data[3].calc.results["energy"]
    with pytest.raises(ValueError, match=r"structure 3 .* it carries no energy, and 9 of 10 structures do; remove it"):
        finetune(model(), data, config=CONFIG)
    finetune(model(), data, config=replace(CONFIG, missing=True))
    for atoms in data:
        atoms.calc.results.pop("forces")
    with pytest.raises(ValueError, match="none of the structures carries forces"):
        finetune(model(), data, config=replace(CONFIG, missing=True))


def initial_rate(made, structures, error):
    """The learning rate of the noise for this error, without a change of the noise weights."""
    how = Initialisation(error=error, start=0.0, balance=1.0, rate=None, learns_energy=False, seed=0)
    return made.learner().initialise(structures, how)


def test_the_weaker_the_response_to_noise_the_larger_its_rate():
    data = molecules()
    weak, strong = model(), model()
    with torch.no_grad():
        strong.noise.w_z.mul_(3)
    rates = [initial_rate(made, data, 0.1) for made in (weak, strong)]
    assert rates[0] == pytest.approx(3 * rates[1], rel=0.02)
    assert initial_rate(weak, data, 0.2) == pytest.approx(2 * rates[0])
    assert_same(state(weak), state(model()))  # finding the rate does not change the model
    done = finetune(weak, data, config=replace(CONFIG, noise_rate=None, epochs=1))
    expected = initial_rate(model(), data, done.scales["forces"])
    assert done.noise_rate == pytest.approx(expected, rel=0.06)  # two digits


def test_noise_can_start_at_random_with_a_spread_of_the_size_of_the_error():
    data, trained = molecules(), model()
    done = finetune(trained, data, config=replace(CONFIG, start=0.5, steps=1, epochs=None, noise_rate=1e-9))
    drawn = trained.sample(data, samples=64)
    spread = float(drawn.spread.forces.square().mean().sqrt())
    assert spread == pytest.approx(0.5 * done.scales["forces"], rel=0.4)  # the response is not quite linear
    others = model()
    finetune(
        others, data, config=replace(CONFIG, start=0.5, steps=1, epochs=None, noise_rate=1e-9, seed=CONFIG.seed + 1)
    )
    assert not torch.allclose(others.sample(data, samples=64).spread.forces, drawn.spread.forces, rtol=0.05)
    with pytest.raises(ValueError, match="deterministic has no noise weights to initialise at random; give start=0"):
        finetune(methods.make("deterministic", tiny_backbone()), data, config=replace(CONFIG, start=1.0))


def test_noise_starts_in_balance_unless_it_should_not():
    """The sites of this potential respond differently, so in balance their weights differ."""
    sizes = {}
    for balance in (0.0, 1.0):
        config = replace(CONFIG, start=1.0, balance=balance, steps=1, epochs=None, noise_rate=1e-9)
        finetune(trained := model(), molecules(), config=config)
        deviations = [float(layer.noise_weight.detach().std()) for layer in noisy_layers(trained.backbone)]
        sizes[balance] = [size for size in deviations if size > 1e-6]
    assert max(sizes[0.0]) < 1.3 * min(sizes[0.0])
    assert max(sizes[1.0]) > 1.5 * min(sizes[1.0])


def test_noise_starts_at_random_unless_there_is_some_already_or_it_should_start_at_zero():
    data, still = molecules(), replace(CONFIG, steps=1, epochs=None, noise_rate=1e-9)

    def spread(trained, config):
        done = finetune(trained, data, config=config)
        root = trained.sample(data, samples=64).spread.forces.square().mean().sqrt()
        return float(root) / done.scales["forces"]

    assert spread(pmlip.perturb(tiny_backbone()), still) == pytest.approx(1, rel=0.5)
    assert spread(pmlip.perturb(tiny_backbone()), replace(still, start=0.0)) < 1e-3
    before, trained = noise_weights(model()), model()
    finetune(trained, data, config=still)
    assert_same(before, noise_weights(trained), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_response_to_noise_is_that_of_structures_without_symmetry():
    """In a perfect crystal no force can have a spread, and a rate by that would be without bounds."""
    pytest.importorskip("chgnet", reason="backbone 'chgnet' is not installed")
    potential = pmlip.perturb(pmlip.load_backbone("chgnet"))
    crystals = [bulk("NaCl", "rocksalt", a=a) for a in np.linspace(5.4, 5.8, 8)]
    rattled = [atoms.copy() for atoms in crystals]
    for number, atoms in enumerate(rattled):
        atoms.rattle(0.05, seed=number)
    rates = [initial_rate(potential, some, 0.05) for some in (crystals, rattled)]
    assert rates[0] == pytest.approx(rates[1], rel=0.7)


def test_validation_structures_must_carry_labels():
    data = molecules()
    with pytest.raises(ValueError, match=r"carry none of energy, forces, stress; Atoms.copy\(\) drops labels"):
        finetune(model(), data[:8], valid=[atoms.copy() for atoms in data[8:]], config=CONFIG)


def noise_weights(model):
    return {name: value for name, value in state(model).items() if name.endswith("noise_weight")}


@pytest.mark.parametrize("offsets", [True, False])
def test_energies_are_right_on_average_after_training(offsets):
    """A constant per atom is fitted again in the end, since the steps move all energies together."""
    data, trained = molecules(), model()
    done = finetune(trained, data, config=replace(CONFIG, offsets=offsets))
    options = {"samples": finetuning.SAMPLES_FOR_OFFSETS, "seed": SEED_OF_FIT}
    _, mean = trained.sample_with_mean(data, **options)
    error = ((labels(data).energy - mean.energy) / mean.atoms_per_system).mean()
    assert (abs(error) < 1e-4) == offsets
    assert sorted(done.offsets) == ([8, 14] if offsets else [])


def test_there_must_be_something_to_train():
    from pmlip.methods.deterministic import Deterministic

    with pytest.raises(ValueError, match="nothing to train: the backbone is frozen"):
        finetune(Deterministic(tiny_backbone()), molecules(), config=replace(CONFIG, freeze_backbone=True))


@pytest.mark.parametrize("equivariant", [True, False])
@pytest.mark.parametrize("asked", [None, True, False])
def test_structures_are_turned_where_the_backbone_is_not_equivariant_unless_asked_otherwise(
    monkeypatch, equivariant, asked
):
    turned = []
    monkeypatch.setattr(batches, "rotated", lambda atoms, _: turned.append(atoms) or atoms)
    trained = model()
    trained.backbone.equivariant = equivariant
    finetune(trained, molecules(), config=replace(CONFIG, epochs=None, steps=1, rotate=asked))
    assert bool(turned) == (not equivariant if asked is None else asked)


def test_a_run_leaves_the_given_structures_alone():
    data = molecules()
    before = fingerprint(data, labels(data))
    finetune(model(), data, config=replace(CONFIG, rotate=True))
    assert fingerprint(data, labels(data)) == before
