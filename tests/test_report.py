import base64
import json
import re
import shutil
import time
from dataclasses import asdict

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

import pmlip
from conftest import randomise_noise
from molecules import calibration
from pmlip.evaluation import Evaluation, evaluate
from pmlip.novelty import Novelty
from pmlip.report import write_report
from pmlip.report.entry import Entry, score_row
from pmlip.report.verdicts import energy_and_stress, headline, sentences
from pmlip.report.view import SHOWN, view
from pmlip.samples import Outputs, Samples
from tiny import tiny_backbone

pytest.importorskip("matplotlib", reason="figures need matplotlib")
pytest.importorskip("chemiscope", reason="the 3-D view needs chemiscope")


@pytest.fixture(scope="module")
def model():
    return randomise_noise(pmlip.perturb(tiny_backbone()), scale=0.2)


def structures(model, *, count=24, stretch=1.0, seed=0):
    """Structures labelled by other samples of the model."""
    made = []
    for index in range(count):
        atoms = Atoms("OH2OH2", cell=[8, 8, 8], pbc=True)
        atoms.positions = stretch * np.array(
            [[0, 0, 0], [0, 0.8, 0.6], [0, -0.8, 0.6], [3, 0, 0], [3, 0.8, 0.6], [3, -0.8, 0.6]]
        )
        atoms.positions += np.random.default_rng([seed, index]).normal(scale=0.15, size=(6, 3))
        drawn = model.sample(atoms, samples=1, seed=1000 + index)
        atoms.calc = SinglePointCalculator(atoms, energy=float(drawn.energy[0, 0]), forces=drawn.forces[0].numpy())
        made.append(atoms)
    return made


def evaluated(model, data):
    return evaluate(model, data, samples=32)


def drawn(*, error, name="data.extxyz", count=40, atoms=6, same=False, outside=None, others=None):
    """A model whose errors are normal, and `error` times as large as its spread, which differs between atoms.

    outside: number of structures outside the training set; None: no novelty. others: other outputs, and how many times
    their error is as large as their spread.
    """
    random = np.random.default_rng(0)
    width = np.ones((count * atoms, 3)) if same else np.repeat(random.uniform(0.2, 2, (count * atoms, 1)), 3, 1)
    samples = width * random.normal(size=(32, count * atoms, 3))
    target = error * width * random.normal(size=(count * atoms, 3))
    system = torch.repeat_interleave(torch.arange(count), atoms)
    named, labelled = {"forces": torch.tensor(samples)}, {"forces": torch.tensor(target)}
    for output, times in (others or {}).items():
        shape = (count, 6) if output == "stress" else (count,)
        named[output] = torch.tensor(random.normal(size=(32, *shape)))
        labelled[output] = torch.tensor(times * random.normal(size=shape))
    of_samples, of_labels = Samples(named, system), Outputs(labelled, system)
    mean, novelty = of_samples.mean, None
    if outside is not None:
        far = torch.arange(count) < outside
        values = 1 + 5 * far.double()
        novelty = Novelty(values[system], values, values, far, torch.ones(count * atoms), mean, ["gradients"] * count)
    return Entry("p-tiny", name, Evaluation(of_samples, mean, mean, of_labels, novelty=novelty))


@pytest.fixture(scope="module")
def page(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    inside, outside = structures(model), structures(model, stretch=1.1, seed=1)
    both = {"p-tiny": evaluated(model, inside), "the same": evaluated(model, inside)}
    far = {"far.extxyz": evaluated(model, outside)}
    write_report(path, both, data="data.extxyz", unseen=far, records={"p-tiny": {"steps": 7}})
    return path


def test_the_page_holds_all_it_needs(page):
    text = page.read_text()
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=[\"'](?!data:)", text)
    for figure in ("spread", "force", "reliability", "ranks", "sparsification", "outside", "parity", "energy"):
        assert re.search(rf'id="{figure}">\s*<svg', text)
    assert "&#34;steps&#34;: 7" in text or '"steps": 7' in text


def said(*entries, unseen=(), records=None):
    return " ".join(sentence["text"] for sentence in sentences(entries, unseen, records or {}))


def test_sentences_say_what_is_wrong():
    right = drawn(error=1.0)
    assert "% of the forces lie outside their 95 % interval (5 % expected): calibrated." in said(right)
    assert "the spread adds information to the size of the force" in said(right)
    narrow = said(drawn(error=2.0))
    assert "overconfident. Scaling the spread by" in narrow
    assert "% worse than the better baseline" in said(drawn(error=2.0, same=True))
    assert float(re.search(r"Scaling the spread by ([\d.]+) corrects it", narrow)[1]) == pytest.approx(2.0, rel=0.1)
    assert "underconfident. Scaling the spread by 0.4" in said(drawn(error=0.4))
    far = said(right, unseen=[drawn(error=4.0, name="far.extxyz")])
    assert re.search(
        r"far.extxyz: compared with data.extxyz, force errors are (3\.9|4\.0)\d times as large and spreads 1.00 times",
        far,
    )
    assert "The spread does not rise: do not rely on it there." in far


@pytest.mark.parametrize(("error", "share"), [(1.0, 95), (2.0, 67)])
def test_a_report_says_whether_a_calibration_keeps_its_promise(error, share):
    record = {"calibration": asdict(calibration(conformal=1.96, samples=32, data="valid.extxyz"))}
    text = said(drawn(error=error), records={"p-tiny": record})
    found = re.search(r"mean ± 1.96 sigma, calibrated on valid.extxyz .* contains (\d+) % .* is 95 %", text)
    assert float(found[1]) == pytest.approx(share, abs=3)


def test_a_report_does_not_judge_an_interval_that_the_calculator_does_not_give():
    """The evaluation has 32 samples, fewer than the calibration."""
    record = {"calibration": asdict(calibration(conformal=1.96, samples=33))}
    assert "conformal interval" not in said(drawn(error=1.0), records={"p-tiny": record})


def test_a_report_says_why_there_is_no_interval():
    withheld = "intervals would be wider than the forces"
    record = {"calibration": asdict(calibration(conformal=None, samples=32, withheld=withheld))}
    found = {one["text"]: one["verdict"] for one in sentences([drawn(error=1.0)], (), {"p-tiny": record})}
    assert found["No conformal intervals: intervals would be wider than the forces."] == "fair"


@pytest.mark.parametrize(("conformal", "verdict"), [(1.5, "bad"), (2.0, "good"), (4.0, "fair")])
def test_an_interval_that_covers_nearly_everything_is_not_good(conformal, verdict):
    record = {"calibration": asdict(calibration(conformal=conformal, samples=32))}
    (found,) = [one for one in sentences([drawn(error=1.0)], (), {"p-tiny": record}) if "conformal" in one["text"]]
    assert found["verdict"] == verdict
    assert ("It is wider than needed." in found["text"]) == (verdict == "fair")


@pytest.mark.parametrize(
    ("error", "verdict", "text"),
    [
        (1.05, "good", r"The error bars of the {} are accurate to \d+ % on hot.xyz \(SSR (0\.[89]|1\.0)\d\)\."),
        (
            0.6,
            "fair",
            r"The spread of the {} is 1\.\d times too wide on hot.xyz \(SSR 1\.\d\d\): \w+ error bars are a rough",
        ),
        (0.1, "bad", r"The spread of the {} is [45]\.\d times too wide on hot.xyz \(SSR [45]\.\d\d\): do not use "),
        (5.0, "bad", r"The spread of the {} is [45]\.\d times too narrow on hot.xyz \(SSR 0\.\d\d\): do not use "),
    ],
)
@pytest.mark.parametrize(("output", "name"), [("energy", "energies"), ("stress", "stress")])
def test_energies_and_stress_have_a_verdict(output, name, error, verdict, text):
    """On each set of structures, and not from a few structures or without labels."""
    entry = drawn(error=1.0, name="hot.xyz", count=200, others={output: error})
    ((found, said),) = energy_and_stress(entry)
    assert found == verdict
    assert re.match(text.format(name), said), said
    for inside, unseen in (([entry], []), ([drawn(error=1.0)], [entry])):
        assert {"verdict": verdict, "text": said} in sentences(inside, unseen, {})
    assert not energy_and_stress(drawn(error=1.0, count=7, others={output: error}))
    assert not energy_and_stress(drawn(error=1.0))


def test_the_headline_says_what_to_do():
    right, wide = drawn(error=1.0, name="test.xyz", outside=0), drawn(error=0.3, name="test.xyz", outside=0)
    verdict, text = headline(right, [drawn(error=1.0, name="hot.xyz", outside=12)])
    assert verdict == "fair"
    assert re.fullmatch(
        r"Reliable on structures like test.xyz \(force error bars accurate to \d %\); 12 of 40 structures of hot.xyz "
        r"lie outside the training set: label some of them and train again\.",
        text,
    )
    verdict, text = headline(right, [drawn(error=1.0, name="hot.xyz", outside=0)])
    assert verdict == "good"
    assert text.endswith("; no structure of test.xyz or hot.xyz lies outside the training set.")
    verdict, text = headline(right, [drawn(error=4.0, name="hot.xyz", outside=0)])
    assert verdict == "fair"  # although novelty sees nothing
    assert re.search(r"; on hot.xyz, force error bars are [34]\.\d times too narrow; ", text)
    verdict, text = headline(wide, ())
    assert verdict == "bad"
    assert re.match(
        r"Not reliable on structures like test.xyz \(force error bars [23]\.\d times too wide\): run ", text
    )
    assert headline(drawn(error=1.6, outside=0), ())[0] == "fair"


def test_the_headline_says_what_it_cannot_tell():
    assert "cannot tell which structures lie outside" in headline(drawn(error=1.0), ())[1]
    assert "add novelty with pmlip novelty." in headline(drawn(error=1.0), ())[1]
    few = headline(drawn(error=1.0, count=7, outside=0), ())
    assert few[0] == "fair"
    assert few[1].startswith("data.extxyz has fewer than 8 structures, too few to judge the force error bars")


def test_the_page_begins_with_the_headline(page):
    first = re.search(r'<p class="headline (\w+)">([^<]*)</p>', page.read_text())
    assert first[1] in ("good", "fair", "bad")
    assert "on structures like data.extxyz" in first[2]


@pytest.fixture(scope="module")
def unusual(model):
    """Structures, of which the last is the most unusual and the first has an atom of infinite novelty."""
    knowing, data = randomise_noise(pmlip.perturb(tiny_backbone()), scale=0.2), structures(model, count=24)
    knowing.fit_novelty(structures(model, count=20, seed=3))
    data[0].numbers[0] = 16
    data[-1].positions[1] *= 1.5
    for index in (0, -1):
        data[index].calc.atoms = data[index].copy()
    return evaluated(knowing, data)


def test_the_view_shows_the_most_unusual_structures_and_their_novelty(unusual):
    assert unusual.novelty.structure[0].isinf()
    dataset = json.loads(base64.b64decode(view(Entry("p-tiny", "data.extxyz", unusual))))
    shown = dataset["properties"]["novelty"]
    assert shown["target"] == "atom"
    assert len(dataset["structures"]) == SHOWN
    assert len(shown["values"]) == SHOWN * 6 == len(dataset["properties"]["force uncertainty"]["values"])
    positions = [np.array([one["x"], one["y"], one["z"]]).T for one in dataset["structures"]]
    by_novelty = np.argsort(-unusual.structure_novelty)[: SHOWN // 2]
    by_spread = np.argsort(
        -np.array([unusual.drawn.spread.forces[unusual.drawn.system == i].norm(dim=1).max() for i in range(24)])
    )[: SHOWN // 2]
    for index in {0, *by_novelty, *by_spread}:
        assert any(np.allclose(unusual.listed[index].positions, one) for one in positions)
    # infinite values are above all others, and do not hide the differences between the others
    values, atom = np.array(shown["values"]), unusual.novelty.atom
    finite = atom[atom.isfinite()]
    assert values.max() <= 2 * float(finite.max())
    assert values[values < values.max()].max() <= float(finite.max())


def test_a_report_with_infinite_novelty(unusual, tmp_path):
    write_report(tmp_path / "report.html", {"p-tiny": unusual}, unseen={"again.extxyz": unusual})
    text = (tmp_path / "report.html").read_text()
    assert "To colour by novelty, open the menu" in text
    assert re.search(r'id="novelty">\s*<svg', text)


def test_a_report_without_novelty_does_not_offer_it(page):
    assert "To colour by novelty" not in page.read_text()


def test_scores_have_intervals_around_them():
    row = score_row(drawn(error=1.0))
    assert row["size"] == "40 structures, 240 atoms, K = 32"
    for value, low, high in row["cells"].values():
        assert float(low.strip(" %")) <= float(value.strip(" %")) <= float(high.strip(" %"))
    value, low, high = row["cells"]["SSR"]
    assert float(low) < 1 < float(high)


def test_the_report_shows_the_scores_of_the_evaluation(model):
    """Also where symmetry fixes some forces, which once counted in one place and not in the other."""
    crystal = Atoms("Cu", cell=[2.4, 2.4, 2.4], pbc=True)
    crystal.calc = SinglePointCalculator(crystal, energy=-3.0, forces=np.zeros((1, 3)))
    evaluation = evaluated(model, [*structures(model, count=4), crystal])
    cells = score_row(Entry("p-tiny", "data.extxyz", evaluation))["cells"]
    forces, energy = evaluation.scores["forces"], evaluation.scores["energy"]
    assert {title: value for title, (value, _, _) in cells.items()} == {
        "MAE, meV/Å": f"{1e3 * forces['mae_expected']:.3g}",
        "CRPS, meV/Å": f"{1e3 * forces['crps']:.3g}",
        "SSR": f"{forces['ssr']:.2f}",
        "in 95 % interval": f"{100 * forces['coverage_95']:.0f} %",
        "Spearman, atoms": f"{forces['spearman_atom']:.2f}",
        "|F| alone, atoms": f"{forces['spearman_atom_of_force']:.2f}",
        "energy: MAE, meV/atom": f"{1e3 * energy['mae_expected']:.3g}",
        "energy: SSR": f"{energy['ssr']:.2f}",
    }


def test_the_report_shows_the_scores_that_only_later_models_or_data_have(model, tmp_path):
    data, outside = structures(model, count=4), structures(model, count=4, seed=1)
    for atoms in data:
        del atoms.calc.results["energy"]
    path = tmp_path / "report.html"
    write_report(path, {"p-tiny": evaluated(model, data)}, unseen={"far.extxyz": evaluated(model, outside)})
    assert "<th>energy: MAE, meV/atom</th>" in path.read_text()


def test_a_report_needs_all_forces(model, tmp_path):
    some = structures(model, count=4)
    del some[1].calc.results["forces"]
    with pytest.raises(ValueError, match="a report needs the forces of every structure"):
        write_report(tmp_path / "report.html", {"p-tiny": evaluated(model, some)})


def test_what_has_no_spread_has_no_report(tmp_path):
    untrained = pmlip.perturb(tiny_backbone())
    with pytest.raises(ValueError, match="p-tiny has no spread to report on"):
        write_report(tmp_path / "report.html", {"p-tiny": evaluated(untrained, structures(untrained, count=3))})
    assert not list(tmp_path.iterdir())


def test_molecules_that_are_all_alike_have_a_report_without_ranks(model, tmp_path):
    """Two dimers: the errors of their atoms are equal, and a resample may hold one of them alone."""
    dimers = []
    for length in (0.7, 0.8):
        atoms = Atoms("H2", [[0, 0, 0], [0, 0, length]])
        atoms.calc = SinglePointCalculator(atoms, energy=0.0, forces=np.array([[0, 0, 0.5], [0, 0, -0.5]]))
        dimers.append(atoms)
    own = evaluated(model, dimers)
    write_report(tmp_path / "report.html", {"p-tiny": own})
    page = (tmp_path / "report.html").read_text()
    assert "nan" not in re.sub(r"<script.*?</script>|data:[^\"]*", "", page, flags=re.DOTALL)
    assert all(np.isfinite(value) for scores in own.scores.values() for value in scores.values())


def test_figures_leave_out_structures_whose_forces_symmetry_fixes(model, tmp_path):
    """One atom in a cell, as in an equation of state: no force, no error, no spread but rounding."""
    crystals = [Atoms("Cu", cell=[a, a, a], pbc=True) for a in (2.4, 2.5, 2.6)]
    for atoms in crystals:
        atoms.calc = SinglePointCalculator(atoms, energy=-3.0, forces=np.zeros((1, 3)))
    fixed, free = evaluated(model, crystals), evaluated(model, structures(model, count=4))
    with pytest.raises(ValueError, match=r"symmetry fixes all forces of eos.extxyz"):
        write_report(tmp_path / "report.html", {"p-tiny": fixed}, data="eos.extxyz")
    write_report(tmp_path / "report.html", {"p-tiny": free}, unseen={"eos.extxyz": fixed})
    mixed = evaluated(model, [*structures(model, count=3), *crystals, *crystals])
    write_report(tmp_path / "mixed.html", {"p-tiny": mixed})
    text = "the figures show 3 of 9 structures, because symmetry fixes all forces of the others"
    assert text in (tmp_path / "mixed.html").read_text()
    assert "eos.extxyz: symmetry fixes all forces" in (tmp_path / "report.html").read_text()


@pytest.fixture
def browser():
    """Headless Chromium, with its console."""
    selenium = pytest.importorskip("selenium.webdriver", reason="the page is tested with selenium")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("needs Chromium: apt-get install chromium chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = binary
    for flag in ("headless=new", "no-sandbox", "no-first-run", "disable-background-networking", "disable-sync"):
        options.add_argument(f"--{flag}")
    for flag in ("disable-component-update", "disable-quic", "enable-unsafe-swiftshader"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    yield started
    started.quit()


def wait_until(condition, message):
    for _ in range(1500):
        if condition():
            return
        time.sleep(0.2)
    pytest.fail(message)


@pytest.mark.parametrize("width", [1300, 500])
def test_the_page_in_a_browser(page, browser, width):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    browser.set_window_size(width, 1000)
    browser.get(page.as_uri())
    ready = "return document.body.dataset.view == 'ready'"
    wait_until(lambda: browser.execute_script(ready), "the 3-D view did not load")
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    figures = browser.find_elements(By.CSS_SELECTOR, "figure svg")
    drawn = [figure for figure in figures if figure.is_displayed() and figure.size["height"] > 150]
    assert len(drawn) == 8
    view = browser.find_element(By.ID, "view-structure")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", view)
    shown = [b""]

    def stands_still():
        shown.append(view.screenshot_as_png)
        return shown[-1] == shown[-2]

    wait_until(stands_still, "the 3-D view does not stand still")
    ActionChains(browser).move_to_element(view).click_and_hold().move_by_offset(80, 40).release().perform()
    wait_until(lambda: view.screenshot_as_png != shown[-1], "the 3-D view did not turn")
