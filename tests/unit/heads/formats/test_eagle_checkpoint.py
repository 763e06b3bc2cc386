"""Published EAGLE layouts: small checkpoints with their names and shapes, read and written."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import CheckpointError
from paceline.heads.eagle import EagleConfig, EagleHead
from paceline.heads.formats.eagle_checkpoint import load_public_eagle, save_speculators_eagle3
from paceline.heads.formats.tensor_files import read_tensors

NUM_LAYERS, V = 30, 50
IDS = torch.tensor([2, 7, 8, 30, 49])
EAGLE3 = EagleConfig("eagle3", 32, 32, 48, 4, 2, 24, feature_layers=(2, 15, 27))
LLAMA = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048, "vocab_size": V, "draft_vocab_size": len(IDS), "num_hidden_layers": 1,
}  # fmt: skip


def head_of(config=EAGLE3) -> EagleHead:
    torch.manual_seed(0)
    return EagleHead(config)


def public_tensors(head, prefix="midlayer.") -> dict[str, torch.Tensor]:
    """Under the names of the public files, with an output layer and its map."""
    tensors = {
        prefix + name.removeprefix("layer.") if name.startswith("layer.") else name: tensor.clone()
        for name, tensor in head.state_dict().items()
    }
    mask = torch.zeros(V, dtype=torch.bool)
    mask[IDS] = True
    rows = torch.randn(len(IDS), 32, generator=torch.Generator().manual_seed(1))
    return tensors | {"lm_head.weight": rows, "d2t": IDS - torch.arange(len(IDS)), "t2d": mask}


@pytest.fixture
def write(tmp_path):
    def write(tensors, config=LLAMA, file="model.safetensors", **changes):
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        if file.endswith(".bin"):
            torch.save(tensors, tmp_path / file)
        else:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / file)
        return tmp_path

    return write


def load(folder):
    return load_public_eagle(folder, num_layers=NUM_LAYERS, vocab_size=V)


def assert_same_weights(found: EagleHead, expected: EagleHead) -> None:
    assert found.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    assert torch.equal(found.inverse_frequencies, expected.inverse_frequencies)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_eagle3_as_its_authors_publish_it(write, file):
    """No rope, no layers of features in the file: EAGLE's own defaults."""
    found = load(write(public_tensors(head_of()), file=file))
    assert_same_weights(found.head, head_of())
    assert found.head.config == EAGLE3
    assert torch.equal(found.entry_ids, IDS)
    assert found.output_weight.shape == (len(IDS), 32)


def test_half_precision_becomes_single(write):
    tensors = {n: t.half() if t.is_floating_point() else t for n, t in public_tensors(head_of()).items()}
    assert load(write(tensors)).head.dtype is torch.float32


def test_specforge_names_the_layers_whose_output_it_reads(write):
    """Row 62: what is named 1, 14 and 26 there are the inputs of 2, 15 and 27."""
    folder = write(public_tensors(head_of()), eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 14, 26]})
    assert load(folder).head.config.feature_layers == (2, 15, 27)


@pytest.mark.parametrize("layer", [29, 30, -1])
def test_outputs_that_are_no_layers_input_are_refused(write, layer):
    folder = write(
        public_tensors(head_of()), eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 14, layer]}
    )
    with pytest.raises(CheckpointError, match=rf"outputs of layers \[{layer}\]"):
        load(folder)


def test_eagle1(write):
    config = EagleConfig("eagle", 32, 32, 48, 4, 4, 8, has_fusion_bias=True)
    tensors = public_tensors(head_of(config), "layers.0.")
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    tensors["embed_tokens.weight"] = torch.randn(V, 32)
    described = {key: LLAMA[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")}
    found = load(write(tensors, described, "pytorch_model.bin", bias=True))
    assert found.head.config == config
    assert_same_weights(found.head, head_of(config))
    assert found.output_weight is None


def test_full_vocabulary_with_five_layers_and_norms_of_heads(write):
    """As the `ttt7` heads are: copies of embedding and output layer, no map, Qwen 3's norms."""
    config = replace(EAGLE3, feature_layers=(2, 8, 16, 22, 27), normalises_heads=True)
    tensors = public_tensors(head_of(config), "layers.0.")
    del tensors["d2t"], tensors["t2d"]
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"] = torch.randn(V, 32)
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].clone()
    folder = write(
        tensors, architectures=["Qwen3Eagle3Model"], eagle_aux_hidden_state_layer_ids=[1, 7, 15, 21, 26]
    )
    found = load(folder)
    assert found.head.config == config
    assert found.entry_ids is None
    assert found.output_weight.shape == (V, 32)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_shards_are_found_through_their_index(write, num_shards):
    """Row 72: a single file needs no index, several have one."""
    tensors = public_tensors(head_of())
    folder = write(tensors)
    if num_shards == 2:
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        parts = {"a.safetensors": names[:4], "b.safetensors": names[4:]}
        for file, own in parts.items():
            save_file({name: tensors[name] for name in own}, folder / file)
        index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same_weights(load(folder).head, head_of())


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 1e6},
    ],
)
def test_rotary_settings_of_either_way_of_writing_are_read(write, rope):
    """Row 58."""
    found = load(write(public_tensors(head_of()), **rope)).head.config.rope_parameters
    assert found["rope_theta"] == 1e6
    is_scaled = "linear" in json.dumps(rope)
    assert (found["rope_type"], found.get("factor")) == (("linear", 2.0) if is_scaled else ("default", None))


@pytest.mark.parametrize("stated", [8, 24, None])
def test_head_dim_is_that_of_the_weights(write, stated):
    """Row 57: published configurations have been wrong, or silent."""
    assert load(write(public_tensors(head_of()), head_dim=stated)).head.config.head_dim == 24


def test_without_heads_of_keys_there_are_as_many_as_heads(write):
    config = replace(EAGLE3, num_kv_heads=4)
    described = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert load(write(public_tensors(head_of(config)), described)).head.config.num_kv_heads == 4


def damaged(change):
    tensors = public_tensors(head_of())
    change(tensors)
    return tensors


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("fc.weight"), r"missing tensors \['fc.weight'\]"),
        (lambda t: t.update(extra=torch.ones(1)), r"unknown tensors \['extra'\]"),
        (lambda t: t.update({"fc.weight": torch.ones(2, 2)}), r"fc.weight has shape \(2, 2\)"),
        (lambda t: t.pop("midlayer.self_attn.q_proj.weight"), "no layer.self_attn.q_proj.weight"),
        (lambda t: (t.pop("d2t"), t.pop("t2d")), "5 rows for 50 tokens, and no d2t"),
        (lambda t: t.update(d2t=torch.zeros(5, dtype=torch.int64)), "the map was lost"),
        (lambda t: t.update(d2t=IDS), "must hold offsets"),
        (lambda t: (t.update(d2t=torch.tensor([0, 2, 5, 8, 11])), t.pop("t2d")), "rises at every entry"),
        (lambda t: t["fc.weight"].fill_(torch.inf), "fc.weight holds values that are not finite"),
        (lambda t: t["lm_head.weight"].fill_(torch.nan), "lm_head.weight holds values that are not finite"),
        (lambda t: t.update(d2t=t["d2t"] + 5), "must hold offsets"),
        (lambda t: t.update(d2t=t["d2t"][:4]), "d2t has 4 entries and lm_head 5 rows"),
        (lambda t: t.update(t2d=~t["t2d"]), "t2d marks 45 tokens"),
        (lambda t: t.pop("lm_head.weight"), "there is no lm_head.weight"),
    ],
)
def test_damaged_files_are_refused(write, change, named):
    """Rows 51, 55 and 59: nothing is random, left over or out of range."""
    with pytest.raises(CheckpointError, match=named):
        load(write(damaged(change)))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size is None"),
        ({"norm_output": True}, "sets norm_output"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act 'gelu_pytorch_tanh'"),
    ],
)
def test_configurations_that_cannot_be_read_are_refused(write, changes, named):
    with pytest.raises(CheckpointError, match=named):
        load(write(public_tensors(head_of()), **changes))


def test_folders_without_weights_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds neither"):
        read_tensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("has_own_rows", [True, False])
def test_the_layout_of_speculators_is_written_and_read_back(tmp_path, has_own_rows):
    rows = torch.randn(len(IDS), 32) if has_own_rows else None
    head = head_of(replace(EAGLE3, rope_parameters={"rope_type": "default", "rope_theta": 100000.0}))
    save_speculators_eagle3(
        tmp_path / "out",
        head,
        output_weight=rows,
        entry_ids=IDS if has_own_rows else None,
        vocab_size=V,
        verifier_name="some/target",
        verifier_architectures=("LlamaForCausalLM",),
    )
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert "layers.0.hidden_norm.weight" in stored
    assert ("lm_head.weight" in stored) == has_own_rows
    assert "embed_tokens.weight" not in stored, "the target has it"
    document = json.loads((tmp_path / "out" / "config.json").read_text())
    # Inputs of layers, as speculators counts them; and what vLLM needs to find the target.
    assert document["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    assert document["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    assert document["draft_vocab_size"] == (len(IDS) if has_own_rows else V)
    found = load(tmp_path / "out")
    assert found.head.config == head.config
    assert_same_weights(found.head, head)
    if has_own_rows:
        assert torch.equal(found.output_weight, rows)
        assert torch.equal(found.entry_ids, IDS)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


def test_only_eagle3_with_as_many_rows_as_ids_is_written(tmp_path):
    given = {
        "vocab_size": V, "verifier_name": "t", "verifier_architectures": (), "output_weight": None
    }  # fmt: skip
    eagle = head_of(EagleConfig("eagle", 32, 32, 48, 4, 4, 8))
    with pytest.raises(CheckpointError, match="kind 'eagle'"):
        save_speculators_eagle3(tmp_path / "out", eagle, entry_ids=None, **given)
    with pytest.raises(CheckpointError, match="5 ids for 0 rows"):
        save_speculators_eagle3(tmp_path / "out", head_of(), entry_ids=IDS, **given)
    assert not (tmp_path / "out").exists()


def test_a_bias_of_q_k_and_v_needs_none_of_the_output(write):
    config = replace(EAGLE3, has_attention_bias=True)
    assert load(write(public_tensors(head_of(config)))).head.config == config


def test_numbers_of_the_other_convention_are_warned_of(write):
    folder = write(
        public_tensors(head_of(), "layers.0."),
        speculators_model_type="eagle3",
        eagle_aux_hidden_state_layer_ids=[1, 14, 26],
    )
    with pytest.warns(UserWarning, match="the numbers of SpecForge"):
        assert load(folder).head.config.feature_layers == (1, 14, 26)
