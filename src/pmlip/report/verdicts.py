"""Sentences that interpret the scores of the models, in the report and in the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from pmlip.evaluation import compare
from pmlip.provenance import Calibration
from pmlip.report.entry import Entry
from pmlip.scores import gaussian_crps
from pmlip.spread_fit import best_factor, best_width

TOLERANCE = 0.03  # largest deviation of a coverage from its level that counts as calibrated
OFFSET = 0.5  # eV/atom; a larger energy error suggests different reference energies
CLOSE, ROUGH = 1.25, 2.0  # largest ratio of spread and error, either way, for a good and for a fair verdict
FEWEST = 8  # structures; an SSR of fewer is too uncertain for a verdict
SPARE = 0.2  # an interval is too wide if it misses less than this part of the labels it may miss
JUDGED = {"energy": "energies", "stress": "stress"}  # outputs besides the forces, and how a sentence names them

Verdict = tuple[str, str]  # good, fair or bad, and a sentence


def sentences(inside: Sequence[Entry], unseen: Sequence[Entry], records: Mapping[str, Any]) -> list[dict[str, str]]:
    """A verdict (good, fair, bad) and a sentence for each finding.

    records: training and calibration of each model, by model name.
    """
    found = []
    if inside[0].evaluation.novelty is not None:
        verdict, text = _training_set(inside[0], unseen)
        found.append({"verdict": verdict, "text": text})
    for entry in inside:
        prefix = f"{entry.model}: " if len(inside) > 1 else ""
        calibration = records.get(entry.model, {}).get("calibration")
        for verdict, text in (
            *_calibration(entry),
            *(_conformal(entry, Calibration.from_record(calibration)) if calibration else ()),
            *_baselines(entry),
            *_ranking(entry),
            *_energy_offset(entry),
            *energy_and_stress(entry),
        ):
            found.append({"verdict": verdict, "text": prefix + text})
    for entry in unseen:
        said = (*_out_of_distribution(inside[0], entry), *energy_and_stress(entry))
        found += [{"verdict": verdict, "text": text} for verdict, text in said]
    return found


def headline(inside: Entry, unseen: Sequence[Entry]) -> Verdict:
    """One sentence: can the force error bars be trusted, and which structures lie outside the training set?"""
    verdict, text = _reliability(inside)
    parts, everything = [text], (inside, *unseen)
    for entry in unseen:
        ratio = _spread_skill_ratio(entry, "forces")
        if ratio is not None and _verdict(ratio) == "bad":
            parts.append(f"on {entry.data}, force error bars are {_amount(ratio)}")
    outside = [(entry, entry.evaluation.outside) for entry in everything if entry.evaluation.outside]
    if any(entry.evaluation.novelty is None for entry in everything):
        parts.append(
            "the model cannot tell which structures lie outside its training set: add novelty with pmlip novelty"
        )
    elif outside:
        listed = " and ".join(
            f"{count} of {one.evaluation.structures} structures of {one.data}" for one, count in outside
        )
        parts.append(f"{listed} lie outside the training set: label some of them and train again")
    else:
        parts.append(f"no structure of {' or '.join(entry.data for entry in everything)} lies outside the training set")
    if verdict == "good" and (outside or len(parts) > 2):
        verdict = "fair"
    return verdict, f"{'; '.join(parts)}."


def energy_and_stress(entry: Entry) -> list[Verdict]:
    """Is the spread of the energies and of the stress as large as the error?"""
    found = []
    for output, name in JUDGED.items():
        ratio = _spread_skill_ratio(entry, output)
        if ratio is None:
            continue
        verdict, shown = _verdict(ratio), f"on {entry.data} (SSR {ratio:.2f})"
        if verdict == "good":
            text = f"The error bars of the {name} are {_amount(ratio)} {shown}."
        else:
            rough = f"{output} error bars are a rough guide"
            advice = rough if verdict == "fair" else f"do not use {output} error bars"
            text = f"The spread of the {name} is {_amount(ratio)} {shown}: {advice}."
        found.append((verdict, text))
    return found


def _reliability(entry: Entry) -> Verdict:
    """Are the force error bars right on this data?"""
    scores = entry.evaluation.scores.get("forces")
    if scores is None:
        return "fair", f"{entry.data} has no forces, so the force error bars cannot be judged"
    metric, bars = ("ssr", "force error bars") if "ssr" in scores else ("ssr_one_pass", "force error bars from novelty")
    if metric not in scores:
        return "bad", "The model has no force error bars"
    ratio = _spread_skill_ratio(entry, "forces", metric)
    if ratio is None:
        return "fair", f"{entry.data} has fewer than {FEWEST} structures, too few to judge the {bars}"
    verdict = _verdict(ratio)
    word = {"good": "Reliable", "fair": "Only roughly reliable", "bad": "Not reliable"}[verdict]
    advice = "" if verdict == "good" else ": run pmlip calibrate"
    return verdict, f"{word} on structures like {entry.data} ({bars} {_amount(ratio)}){advice}"


def _spread_skill_ratio(entry: Entry, output: str, metric: str = "ssr") -> float | None:
    """The SSR of an output; None if it has no spread, or too few structures have labels."""
    ratio = entry.evaluation.scores.get(output, {}).get(metric, 0.0)
    structures = len(np.unique(entry.evaluation.columns[output].entries.system)) if ratio else 0
    return ratio if structures >= FEWEST else None


def _verdict(ratio: float) -> str:
    """The verdict on a ratio of spread and error."""
    wrong = max(ratio, 1 / ratio)
    return "good" if wrong <= CLOSE else "fair" if wrong <= ROUGH else "bad"


def _amount(ratio: float) -> str:
    """How wrong error bars with this SSR are."""
    if _verdict(ratio) == "good":
        return f"accurate to {max(round(100 * abs(ratio - 1)), 1)} %"
    return f"{max(ratio, 1 / ratio):.1f} times too {'wide' if ratio > 1 else 'narrow'}"


def _training_set(inside: Entry, unseen: Sequence[Entry]) -> Verdict:
    """How many structures lie outside the training set?"""
    counts = [(entry.data, entry.evaluation.outside or 0, entry.evaluation.structures) for entry in (inside, *unseen)]
    listed = ", ".join(f"{outside} of {total} in {data}" for data, outside, total in counts)
    text = f"Outside the training set, by novelty: {listed}."
    few = counts[0][1] <= 0.1 * counts[0][2]
    if any(outside for _, outside, _ in counts):
        text += " Their spread can be too small; label a few of them and train on the labels."
    return ("good" if not any(outside for _, outside, _ in counts) else "fair" if few else "bad", text)


def _calibration(entry: Entry) -> list[Verdict]:
    """Is the 95 % interval right? If not, does one factor on the spread correct it?"""
    outside = 1 - entry.evaluation.scores["forces"]["coverage_95"]
    start = f"{100 * outside:.0f} % of the forces lie outside their 95 % interval (5 % expected)"
    if abs(outside - 0.05) <= TOLERANCE:
        return [("good", f"{start}: calibrated.")]
    name = "overconfident" if outside > 0.05 else "underconfident"
    verdict = "bad" if outside > 0.15 else "fair"
    if entry.evaluation.samples < 3:  # too few to fit a factor
        return [(verdict, f"{start}: {name}.")]
    best, covering = best_factor(entry.forces.samples, entry.forces.label), _covering_factor(entry)
    if abs(np.log(best / covering)) < np.log(1.25):
        return [(verdict, f"{start}: {name}. Scaling the spread by {best:.2f} corrects it.")]
    tails = "heavier" if covering > best else "lighter"
    text = (
        f"{start}: {name}. No single factor corrects it: the CRPS is lowest with {best:.2f}, and the coverage is right "
        f"with {covering:.2f}. The errors have {tails} tails than the samples."
    )
    return [(verdict, text)]


def _covering_factor(entry: Entry) -> float:
    """The factor on the spread that puts 95 % of the forces inside their 95 % interval."""
    count, varying = entry.evaluation.samples, entry.forces.varying_entries
    z = np.abs(varying["error"]) / varying["sigma"]
    about_mean = float(np.quantile(z, 0.95) / stats.t.isf(0.025, count - 1))
    # scale about the true mean, as in `best_factor`; the mean of K samples has an error of spread / sqrt(K)
    return float(np.sqrt(max((1 + 1 / count) * about_mean**2 - 1 / count, 1e-4)))


def _conformal(entry: Entry, calibration: Calibration) -> list[Verdict]:
    """Does the conformal interval of the calibration reach its level on this data?"""
    factor, level = calibration.conformal_for(entry.evaluation.samples), calibration.level
    if calibration.withheld:
        return [("fair", f"No conformal intervals: {calibration.withheld}.")]
    if factor is None:  # the calculator gives no interval either
        return []
    varying = entry.forces.varying_entries
    inside = float((np.abs(varying["expected_error"]) <= factor * varying["sigma"]).mean())
    text = (
        f"The conformal interval (mean ± {factor:.2f} sigma, calibrated on {calibration.data or 'validation data'}"
        f" with K = {calibration.samples}) contains {100 * inside:.0f} % of the forces; its level for similar "
        f"structures is {100 * level:.0f} %."
    )
    if 1 - inside < SPARE * (1 - level):
        return [("fair", f"{text} It is wider than needed.")]
    return [("good" if inside >= level - TOLERANCE else "bad", text)]


def _energy_offset(entry: Entry) -> list[Verdict]:
    """Is the energy error so large that the reference energies must differ?"""
    energy = entry.evaluation.scores.get("energy", {})
    if energy.get("mae_expected", 0.0) < OFFSET:
        return []
    text = f"The energy error is {energy['mae_expected']:.2f} eV/atom, so the reference energies probably differ: "
    return [("bad", text + "fit energies per element to these data, as pmlip finetune does.")]


def _baselines(entry: Entry) -> list[Verdict]:
    """Is the learned spread better than two simple baselines around the same mean?"""
    entries = entry.forces.entries
    error = entries["error"]
    # The fair CRPS estimates the CRPS of infinitely many samples, so use the error of their mean for the baselines.
    sampling = float((entries["spread"] ** 2).mean()) / entry.evaluation.samples
    error = error * np.sqrt(max(1 - sampling / float((error**2).mean()), 0.0))
    own = 1e3 * entry.evaluation.scores["forces"]["crps"]
    size = np.repeat(entry.forces.atoms["force"], 3)
    constant, scaled = (
        1e3 * float(gaussian_crps(error, best_width(error, unit) * unit).mean()) for unit in (np.ones_like(size), size)
    )
    best = min(constant, scaled)
    text = (
        f"The CRPS of the forces is {own:.1f} meV/Å. Around the same mean, a constant width fitted to these labels "
        f"gives {constant:.1f}, and a fitted width proportional to |F| {scaled:.1f}. The learned spread is "
        f"{abs(100 * (1 - own / best)):.0f} % {'better' if own < best else 'worse'} than the better baseline."
    )
    return [("good" if own < 0.98 * best else "fair" if own < 1.02 * best else "bad", text)]


def _ranking(entry: Entry) -> list[Verdict]:
    scores = entry.evaluation.scores["forces"]
    names = ("spearman_atom", "spearman_atom_of_force", "spearman_atom_given_force")
    if not all(name in scores for name in names):  # too few atoms, or all errors equal
        return []
    own, force, beyond = (scores[name] for name in names)
    how_much = "adds information to" if beyond > 0.2 else "adds little to" if beyond > 0.05 else "adds nothing to"
    text = (
        f"The spread ranks atoms by force error with a Spearman correlation of {own:.2f}; |F| alone reaches "
        f"{force:.2f}. The partial correlation given |F| is {beyond:.2f}: the spread {how_much} the size of the force."
    )
    return [("good" if beyond > 0.2 else "fair" if beyond > 0.05 else "bad", text)]


def _out_of_distribution(inside: Entry, outside: Entry) -> list[Verdict]:
    if not outside.has_varying_forces:
        return [("fair", f"{outside.data}: symmetry fixes all forces, so they do not test the model.")]
    against = compare(inside.evaluation, outside.evaluation)
    error, spread = against["error_ratio"], against["spread_ratio"]
    text = (
        f"{outside.data}: compared with {inside.data}, force errors are {error:.2f} times as large and spreads "
        f"{spread:.2f} times as large. The spread separates the two sets with an AUROC of "
        f"{against['auroc_spread']:.2f}, |F| alone with {against['auroc_force']:.2f} (chance: 0.5). "
    )
    if "auroc_novelty" in against:
        scores = outside.evaluation.scores["forces"]
        text += f"Novelty separates them with {against['auroc_novelty']:.2f}. "
        if "ssr_one_pass" in scores:
            text += f"The error bars from novelty have an SSR of {scores['ssr_one_pass']:.2f} there. "
    if error < 1.1:
        return [("good", text + "The model is as accurate there.")]
    if spread > 0.8 * error:
        return [("good", text + "The spread rises with the error.")]
    if spread > 1.1:
        return [("fair", text + "The spread rises less than the error: the model is overconfident there.")]
    return [("bad", text + "The spread does not rise: do not rely on it there.")]
