"""SevenNet: forces and stress by autograd; the package includes the weights.

Every sample is exactly equivariant to rotation, translation and permutation, and its forces are exact gradients.
"""

import copy
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import Calculator
from torch import Tensor, nn

from pmlip.atomic_files import atomic_write
from pmlip.backbones.base import Backbone, Graph, Readout
from pmlip.noise.injection import Site

try:
    import sevenn
    from sevenn import _const
    from sevenn import _keys as KEY
    from sevenn.calculator import SevenNetCalculator
    from sevenn.checkpoint import SevenNetCheckpoint, _config_cp_routine
    from sevenn.nn.scale import Rescale
    from sevenn.nn.sequential import AtomGraphSequential

    from pmlip.backbones._neighbours import Batch, atom_of_row, build_graph, join, outputs_by_gradient
except ImportError as error:
    raise ImportError("backbone 'sevenn' needs: pip install 'pmlip[sevenn]'") from error

VARIANTS = {
    "7net-0": _const.SEVENNET_0_11Jul2024,
    "7net-0_22may2024": _const.SEVENNET_0_22May2024,
    "7net-l3i5": _const.SEVENNET_l3i5,
    "7net-mf-0": _const.SEVENNET_MF_0,
}

# numpy types in SevenNet checkpoints (reference energies, statistics), which torch's safe loader must allow.
ARRAYS: list[Any] = [
    np.ndarray,
    np.dtype,
    *{type(np.dtype(name)) for name in ("float32", "float64", "int32", "int64", "bool")},
    *(
        (value.__reduce__()[0], f"numpy.{core}.multiarray.{name}")  # module path of numpy 1, then of numpy 2
        for name, value in (("_reconstruct", np.zeros(1)), ("scalar", np.float64(0)))
        for core in ("core", "_core")
    ),
]


class SevenNetBackbone(Backbone):
    name = "sevenn"
    equivariant = True
    conservative = True
    module: AtomGraphSequential

    def __init__(self, module: AtomGraphSequential, variant: str, *, config: Mapping[str, Any]) -> None:
        super().__init__(module, variant)
        self.config = config  # the checkpoint's settings, from which SevenNet builds the module
        modals, modal = list(module.modal_map or ()), variant.partition(":")[2]
        if modal not in (modals or [""]):
            allowed = " or ".join(f"'sevenn:{variant.partition(':')[0]}{m and ':' + m}'" for m in modals or [""])
            raise ValueError(
                f"'sevenn:{variant}' does not name a modality (level of theory) of this model; ask for {allowed}"
            )
        self.modal = modal or None
        # Leave e3nn's compiled constants out of state dicts: their number differs in copies and between torch versions.
        self.register_state_dict_post_hook(_leave_constants_out)
        self.register_load_state_dict_post_hook(_do_not_miss_constants)

    def sites(self) -> list[Site]:
        layers = [name for name, _ in self.module.named_children() if name.endswith("_convolution")]
        return [Site(f"{layer}.weight_nn.layer0", "edge") for layer in layers]

    def atom_of_row(self, graph: Graph) -> dict[str, Tensor]:
        return atom_of_row(graph)

    def readouts(self) -> list[Readout]:
        linear = self.module.reduce_input_to_hidden.linear
        return [Readout("reduce_input_to_hidden.linear", linear.irreps_in.count("0e"))]

    def single(self, atoms: Atoms, index: int) -> Graph:
        return build_graph(
            atoms,
            index,
            cutoff=self.module.cutoff,
            species=self.module.type_map,
            like=self._like,
            potential=self.variant,
        )

    def join_batches(self, batches: Sequence[Batch]) -> Batch:
        return join(batches)

    def forward(self, graph: Graph) -> dict[str, Tensor]:
        return outputs_by_gradient(graph, partial(self._energy, graph), self._like)

    def _energy(self, graph: Graph, vectors: Tensor) -> Tensor:
        """Run the layers one by one; skip the layers that sum energies and compute forces."""
        batch: Batch = graph.batch
        data: dict[str, Tensor] = {
            KEY.NODE_FEATURE: batch.species,
            KEY.EDGE_IDX: batch.edge.T,
            KEY.EDGE_VEC: vectors,
            KEY.BATCH: graph.rows["node"],
        }
        if self.modal:
            data[KEY.MODAL_TYPE] = torch.full_like(batch.volume, self.module.modal_map[self.modal], dtype=torch.long)
        for name, layer in self.module.named_children():
            if name == "rescale_atomic_energy":
                data[KEY.SCALED_ATOMIC_ENERGY] = data[KEY.SCALED_ATOMIC_ENERGY].double()
            if name in ("reduce_total_enegy", "force_output"):
                continue
            data = layer(data)
            if name == "onehot_idx_to_onehot":  # this layer always returns single precision
                data |= {key: data[key].to(vectors) for key in (KEY.NODE_FEATURE, KEY.NODE_ATTR)}
        energy = data[KEY.ATOMIC_ENERGY][:, 0]
        return energy.new_zeros(graph.systems).index_add(0, graph.rows["node"], energy)

    @property
    def elements(self) -> list[int]:
        return list(self.module.type_map)

    def references(self) -> dict[int, float]:
        rescale = self.module.rescale_atomic_energy
        if isinstance(rescale, Rescale):
            return dict.fromkeys(self.elements, float(rescale.shift))
        shift = rescale.shift.reshape(-1, rescale.shift.shape[-1])[0]
        return {number: float(shift[index]) for number, index in self.module.type_map.items()}

    def shift_references(self, offsets: Mapping[int, float]) -> None:
        rescale = self.module.rescale_atomic_energy
        if isinstance(rescale, Rescale):
            if len(offsets) < len(self.elements) or len(set(offsets.values())) > 1:
                raise ValueError(
                    "this SevenNet has one energy offset for all elements, not one for each; pass offsets=False to "
                    "train without offsets"
                )
            with torch.no_grad():
                rescale.shift += next(iter(offsets.values()))
            return
        with torch.no_grad():
            for number, offset in offsets.items():
                rescale.shift[..., self.module.type_map[number]] += offset

    def calculator(self) -> Calculator:
        with warnings.catch_warnings():
            # SevenNet recommends fused kernels, which would bypass the noise
            warnings.filterwarnings("ignore", message="No tensor product accelerator")
            # a copy: the calculator switches its model to unbatched input
            return SevenNetCalculator(copy.deepcopy(self.module), device=self._like.device, modal=self.modal)

    def save(self, path: str | Path) -> None:
        """Write a SevenNet checkpoint; raise an error for a folded sample, which the format cannot store."""
        if extra := [name for name in self.module.state_dict() if name.endswith("layer0.shift")]:
            raise ValueError(
                f"a SevenNet file cannot hold a folded sample ({extra[0]}); save the perturbed model instead, and fold "
                "it after pmlip.load"
            )
        state = {name: value for name, value in self.module.state_dict().items() if "_tensor_constant" not in name}
        with atomic_write(path) as file:
            torch.save({"config": dict(self.config), "model_state_dict": state, "epoch": 0}, file)


def load(variant: str = "", *, weights: str | Path | None = None, device: str = "cpu") -> SevenNetBackbone:
    """Load a SevenNet by its name, "7net-0", or a local checkpoint.

    A multi-fidelity model needs a modality after a colon, "7net-mf-0:PBE".
    """
    variant = variant or next(iter(VARIANTS))
    name = variant.partition(":")[0]
    if weights is None and name not in VARIANTS:
        raise ValueError(f"unknown SevenNet {name!r}; allowed: {', '.join(VARIANTS)}")
    if weights is not None and not Path(weights).is_file():
        raise FileNotFoundError(f"there is no weights file {weights}")
    checkpoint = _read(VARIANTS[name] if weights is None else weights)
    module = checkpoint.build_model(enable_cueq=False, enable_flash=False, enable_oeq=False)
    # build_model has converted the weights to this version and to plain layers, so the settings must say so
    config = checkpoint.config | {"version": sevenn.__version__, KEY.CUEQUIVARIANCE_CONFIG: {"use": False}}
    config |= {KEY.USE_FLASH_TP: False, KEY.USE_OEQ: False}
    return SevenNetBackbone(module.eval(), variant, config=config).to(device)


def _read(path: str | Path) -> SevenNetCheckpoint:
    """Read a SevenNet checkpoint without executing code in it; SevenNet's reader would unpickle the file."""
    try:
        with torch.serialization.safe_globals(ARRAYS):
            content = torch.load(path, map_location="cpu", weights_only=True)
        config, state = content["config"], content["model_state_dict"]
    except Exception:  # torch raises many types of error for damaged files, and some advise to load them unsafely
        raise ValueError(
            f"{path} is not a checkpoint of SevenNet, or it holds more than weights and settings"
        ) from None
    checkpoint = SevenNetCheckpoint(path)
    checkpoint._config = _config_cp_routine(config)
    checkpoint._model_state_dict = state
    checkpoint._loaded = True
    return checkpoint


def _leave_constants_out(backbone: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    for name in [name for name in state if name.startswith(prefix) and "._compiled_" in name]:
        del state[name]


def _do_not_miss_constants(backbone: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [name for name in keys.missing_keys if "._compiled_" not in name]
