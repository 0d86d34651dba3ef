import re
import shutil
import time

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

import pmlip
from conftest import randomise_noise
from pmlip.evaluation import Evaluation, evaluate
from pmlip.report import Judged, write_report
from pmlip.report.judged import score_row
from pmlip.report.verdicts import sentences
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


def judged(model, data, name="data.extxyz", called="p-tiny"):
    return Judged(called, name, evaluate(model, data, samples=32))


def drawn(*, error, name="data.extxyz", count=40, atoms=6, same=False):
    """A model whose errors are normal, and `error` times as large as its spread, which differs between atoms."""
    random = np.random.default_rng(0)
    width = np.ones((count * atoms, 3)) if same else np.repeat(random.uniform(0.2, 2, (count * atoms, 1)), 3, 1)
    samples = width * random.normal(size=(32, count * atoms, 3))
    target = error * width * random.normal(size=(count * atoms, 3))
    system = torch.repeat_interleave(torch.arange(count), atoms)
    of_samples, of_labels = (
        Samples({"forces": torch.tensor(samples)}, system),
        Outputs({"forces": torch.tensor(target)}, system),
    )
    squares = [(x**2).reshape(count, -1).mean(1) ** 0.5 for x in (samples.std(0, ddof=1), samples.mean(0) - target)]
    mean = of_samples.mean
    return Judged("p-tiny", name, Evaluation(32, count, {}, 0.0, *squares, of_samples, mean, mean, of_labels))


@pytest.fixture(scope="module")
def page(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    inside, outside = structures(model), structures(model, stretch=1.1, seed=1)
    both = [judged(model, inside), judged(model, inside, called="the same")]
    write_report(path, both, [judged(model, outside, "far.extxyz")], records={"p-tiny": {"steps": 7}})
    return path


def test_the_page_holds_all_it_needs(page):
    text = page.read_text()
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=[\"'](?!data:)", text)
    for figure in ("spread", "force", "reliability", "ranks", "sparsification", "outside", "parity", "energy"):
        assert re.search(rf'id="{figure}">\s*<svg', text)
    assert "&#34;steps&#34;: 7" in text or '"steps": 7' in text


def said(*judgements, unseen=(), records=None):
    return " ".join(sentence["text"] for sentence in sentences(judgements, unseen, records or {}))


def test_sentences_say_what_is_wrong():
    right = drawn(error=1.0)
    assert "(5 % would be right): calibrated." in said(right)
    assert "it knows more than that large forces have large errors" in said(right)
    narrow = said(drawn(error=2.0))
    assert "over-confident; a factor of" in narrow
    assert "worse by" in said(drawn(error=2.0, same=True))
    assert float(re.search(r"a factor of ([\d.]+) on the spread mends it", narrow)[1]) == pytest.approx(2.0, rel=0.1)
    assert "under-confident; a factor of 0.4" in said(drawn(error=0.4))
    far = said(right, unseen=[drawn(error=4.0, name="far.extxyz")])
    assert re.search(
        r"On far.extxyz the errors are (3\.9|4\.0)\d times those on data.extxyz, the spread 1.00 times", far
    )
    assert "It does not notice: do not rely on the spread there." in far


@pytest.mark.parametrize(("error", "share"), [(1.0, 95), (2.0, 67)])
def test_a_report_says_whether_a_calibration_keeps_its_promise(error, share):
    calibration = {"conformal": 1.96, "level": 0.95, "data": "valid.extxyz", "samples": 32}
    text = said(drawn(error=error), records={"p-tiny": {"calibration": calibration}})
    found = re.search(r"on valid.extxyz, mean ± 1.96 sigma, holds (\d+) % .* 95 % were promised", text)
    assert float(found[1]) == pytest.approx(share, abs=3)


def test_scores_have_intervals_around_them():
    row = score_row(drawn(error=1.0))
    assert row["size"] == "40 structures, 240 atoms, K = 32"
    for value, low, high in row["cells"].values():
        assert float(low.strip(" %")) <= float(value.strip(" %")) <= float(high.strip(" %"))
    value, low, high = row["cells"]["SSR"]
    assert float(low) < 1 < float(high)


def test_what_has_no_spread_has_no_report(tmp_path):
    untrained = pmlip.perturb(tiny_backbone())
    with pytest.raises(ValueError, match="p-tiny has no spread to report on"):
        write_report(tmp_path / "report.html", [judged(untrained, structures(untrained, count=3))])
    assert not list(tmp_path.iterdir())


def test_molecules_that_are_all_alike_have_a_report_without_ranks(model, tmp_path):
    """Two dimers: the errors of their atoms are equal, and a resample may hold one of them alone."""
    dimers = []
    for length in (0.7, 0.8):
        atoms = Atoms("H2", [[0, 0, 0], [0, 0, length]])
        atoms.calc = SinglePointCalculator(atoms, energy=0.0, forces=np.array([[0, 0, 0.5], [0, 0, -0.5]]))
        dimers.append(atoms)
    own = judged(model, dimers)
    write_report(tmp_path / "report.html", [own], [])
    page = (tmp_path / "report.html").read_text()
    assert "nan" not in re.sub(r"<script.*?</script>|data:[^\"]*", "", page, flags=re.DOTALL)
    assert all(np.isfinite(value) for scores in own.evaluation.scores.values() for value in scores.values())


def test_forces_that_symmetry_fixes_are_left_out(model, tmp_path):
    """One atom in a cell, as in an equation of state: no force, no error, no spread but rounding."""
    crystals = [Atoms("Cu", cell=[a, a, a], pbc=True) for a in (2.4, 2.5, 2.6)]
    for atoms in crystals:
        atoms.calc = SinglePointCalculator(atoms, energy=-3.0, forces=np.zeros((1, 3)))
    fixed, moving = judged(model, crystals, "eos.extxyz"), judged(model, structures(model, count=4))
    with pytest.raises(ValueError, match=r"symmetry fixes all forces of eos.extxyz"):
        write_report(tmp_path / "report.html", [fixed])
    write_report(tmp_path / "report.html", [moving], [fixed])
    mixed = judged(model, [*structures(model, count=3), *crystals, *crystals])
    write_report(tmp_path / "mixed.html", [mixed])
    assert "3 structures of 9 (in the others symmetry fixes the forces)" in (tmp_path / "mixed.html").read_text()
    assert "On eos.extxyz symmetry fixes all forces" in (tmp_path / "report.html").read_text()


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
