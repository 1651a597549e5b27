"""Pushing checkpoints to the Hub, with the real client against a local Hub."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

pytest.importorskip("huggingface_hub")
pytest.importorskip("peft")

from huggingface_hub import ModelCard, parse_eval_result_entries

from clawgym.cli import app
from clawgym.errors import RunFolderError
from clawgym.hub import HubError, UploadPlan, plan_checkpoint, read_checkpoint
from clawgym.hub._card import portable

from .runs import HASH, lora_run, train_run
from .server import USER, Hub

WEIGHTS = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
MADE = {".eval_results/clawgym-clawgym-bench.yaml", "README.md", "curve.svg"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    return train_run(tmp_path_factory.mktemp("hub") / "my-run", model_folder)


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    return lora_run(tmp_path_factory.mktemp("hub") / "my-lora", model_folder)


def names(plan: UploadPlan) -> set[str]:
    return {upload.path for upload in plan.uploads}


def push(run: Path, *more: str) -> Any:
    return CliRunner().invoke(app, ["push", "checkpoint", str(run), *more])


# -- what is in it


def test_only_model_tokenizer_and_run_information_are_uploaded(run: Path) -> None:
    with plan_checkpoint(read_checkpoint(run)) as plan:
        assert names(plan) == WEIGHTS | MADE
        assert plan.title == "my-run: step 2"
    with plan_checkpoint(read_checkpoint(run, "last")) as plan:
        assert plan.title == "my-run: step 4"
    assert read_checkpoint(run, "4").folder == read_checkpoint(run, "000004").folder


def test_card_names_base_model_and_training_data(run: Path, tmp_path: Path) -> None:
    with plan_checkpoint(read_checkpoint(run)) as plan:
        text = plan.card
        files = {upload.path: upload.source for upload in plan.uploads if isinstance(upload.source, bytes)}
    card = ModelCard(text)
    results = {r.dataset_name: r for r in card.data.eval_results}
    assert {name: (r.metric_value, r.dataset_split) for name, r in results.items()} == {
        "ClawGym-Bench": (0.625, "held-out"),
        "terminal-basic": (0.625, "held-out"),
    }
    assert results["ClawGym-Bench"].dataset_type == "RUC-AIBOX/ClawGym-Bench"
    for shown in (HASH, "| optimizer.lr | 1e-05 |", "| algorithm | grpo |", "0.525 to 0.725", "step 2", "](curve.svg)"):
        assert shown in text
    assert str(run.parent) not in text
    assert "/tmp" not in text
    svg = files["curve.svg"].decode()
    assert svg.count("<circle") == 4  # two sets, evaluated before and at step 2: what comes later is not shown
    assert "reward_mean" in svg
    assert str(run.parent) not in svg
    (entry,) = parse_eval_result_entries(yaml.safe_load(files[".eval_results/clawgym-clawgym-bench.yaml"]))
    assert (entry.dataset_id, entry.task_id, entry.value) == ("RUC-AIBOX/ClawGym-Bench", "held-out", 0.625)
    assert entry.notes == "held-out split, 95 % interval 0.525 to 0.725, 200 episodes, 1 samples, ClawGym 0.1.0"


def test_card_separates_training_data_from_evaluations(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    manifest = json.loads((copy / "receipt.json").read_text())
    manifest["task_set"]["name"] = "terminal-basic:heldout"
    manifest["config"] |= {"method": "rl", "tasks": {"set": "terminal-basic"}}
    manifest["config"]["parts"] = {name: {"tasks": 3, "sha256": HASH} for name in ("train", "validation", "heldout")}
    (copy / "receipt.json").write_text(json.dumps(manifest))
    with plan_checkpoint(read_checkpoint(copy)) as plan:
        data = plan.card.split("## Data")[1].split("## Settings")[0]
    assert f"| training | terminal-basic | training | 3 | `{HASH}` |" in data
    assert f"| evaluation only | terminal-basic | held-out | 3 | `{HASH}` |" in data
    assert "terminal-basic:heldout" not in data


@pytest.mark.parametrize(("model", "base"), [("team/tiny", "team/tiny"), ("models/tiny", None)])
def test_local_folder_is_not_named_as_base_model(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, base: str | None
) -> None:
    (tmp_path / "models/tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    copy = shutil.copytree(run, tmp_path / "run")
    manifest = json.loads((copy / "receipt.json").read_text())
    manifest["engine"] = {"model": model}
    (copy / "receipt.json").write_text(json.dumps(manifest))
    with plan_checkpoint(read_checkpoint(copy)) as plan:
        assert ModelCard(plan.card).data.base_model == base
        assert f"{model.split('/')[1] if base is None else base}, trained with" in plan.card


def test_greedy_and_sampled_scores_are_distinguished(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    row = {"step": 2, "task_set": "ClawGym-Bench", "split": "held-out", "low": 0.4, "high": 0.6}
    with (copy / "evaluations.jsonl").open("a") as file:
        for greedy, score in ((False, 0.5), (True, 0.55)):
            file.write(json.dumps({**row, "score": score, "greedy": greedy}) + "\n")
    with plan_checkpoint(read_checkpoint(copy)) as plan:
        said = {r.metric_name: r.metric_value for r in ModelCard(plan.card).data.eval_results}
        made = next(u.source for u in plan.uploads if u.path == ".eval_results/clawgym-clawgym-bench.yaml")
        assert "| held-out | greedy | 0.550 |" in plan.card
    assert said["mean score, sampled"] == 0.5
    assert said["mean score, greedy"] == 0.55
    assert isinstance(made, bytes)
    (entry,) = parse_eval_result_entries(yaml.safe_load(made))
    assert entry.value == 0.5
    assert "sampled" in entry.notes


@pytest.mark.parametrize("ends", [{}, {"low": 0.4}, {"high": 0.6}, {"low": None, "high": 0.6}], ids=str)
def test_interval_needs_both_ends(run: Path, tmp_path: Path, ends: dict[str, Any]) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    rows = [json.loads(line) for line in (copy / "evaluations.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("low", None)
        row.pop("high", None)
        row.update(ends)
    (copy / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with plan_checkpoint(read_checkpoint(copy)) as plan:
        assert "0.625" in plan.card
        made = next(u.source for u in plan.uploads if u.path == ".eval_results/clawgym-clawgym-bench.yaml")
    assert isinstance(made, bytes)
    assert b"interval" not in made


def test_other_files_beside_the_model_are_not_uploaded(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    folder = read_checkpoint(copy).folder
    for name in ("optimizer.pt", "notes.txt", "model.safetensors.tmp", ".hidden"):
        (folder / name).write_text("x")
    (folder / "tokenizer.model").mkdir()
    with plan_checkpoint(read_checkpoint(copy)) as plan:
        assert names(plan) == WEIGHTS | MADE


def test_adapter_has_its_tokenizer_and_no_local_paths(lora: Path, model_folder: Path) -> None:
    with plan_checkpoint(read_checkpoint(lora)) as plan:
        assert names(plan) == MADE | {
            *("adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json")
        }
        settings = next(u.source for u in plan.uploads if u.path == "adapter_config.json")
        assert isinstance(settings, bytes)
        assert json.loads(settings)["base_model_name_or_path"] == model_folder.name
        assert str(model_folder.parent) not in plan.card
        assert "--merge" in plan.notes[0]
        assert "LoRA adapter" in plan.card


def test_models_from_the_hub_keep_their_name(lora: Path, model_folder: Path, tmp_path: Path) -> None:
    there = shutil.copytree(model_folder, tmp_path / "models--team--tiny-model/snapshots/0123abcd")
    copy = shutil.copytree(lora, tmp_path / "run")
    settings = copy / "checkpoints/000002/adapter/adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"base_model_name_or_path": str(there)}))
    with plan_checkpoint(read_checkpoint(copy)) as plan:
        pushed = next(u.source for u in plan.uploads if u.path == "adapter_config.json")
        assert isinstance(pushed, bytes)
        assert json.loads(pushed)["base_model_name_or_path"] == "team/tiny-model"
        assert ModelCard(plan.card).data.base_model == "team/tiny-model"
        assert not plan.notes


def test_merged_model_computes_the_same_as_the_adapted_one(lora: Path, model_folder: Path, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ids = torch.arange(20, 40)[None]
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    plain = base(ids).logits
    adapted = PeftModel.from_pretrained(base, str(lora / "checkpoints/000002/adapter"))(ids).logits
    with plan_checkpoint(read_checkpoint(lora), merge=True) as plan:
        assert names(plan) == WEIGHTS | MADE
        for upload in plan.uploads:
            if not upload.path.startswith("."):
                source = upload.source
                (tmp_path / upload.path).write_bytes(source if isinstance(source, bytes) else source.read_bytes())
        temporary = next(u.source for u in plan.uploads if u.path == "model.safetensors")
        assert isinstance(temporary, Path)
    assert not temporary.parent.exists()
    said = AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits
    torch.testing.assert_close(said, adapted, atol=1e-4, rtol=1e-4)
    assert (said - plain).abs().max() > 0.01


# -- what is refused


@pytest.mark.parametrize(
    "config",
    [
        {"logging": {"wandb": "hf_" + "aB3" * 11}},
        {"api_key": "q7Gk2Lx9Vt4Rz8Pw1Nd5"},
        {"env": {"WANDB_API_KEY": "0f3a9c1b7d5e2846af90b1c2d3e4f506a7b8c9d0"}},
        {"endpoint": "https://me:hunter22@example.org/v1"},
        {"note": "-----BEGIN RSA PRIVATE KEY-----"},
        {"s3": "AKIA" + "ABCDEFGH12345678"},
    ],
)
def test_secrets_in_settings_are_not_uploaded(config: dict, model_folder: Path, tmp_path: Path) -> None:
    run = train_run(tmp_path / "run", model_folder, **config)
    with pytest.raises(HubError, match="nothing was uploaded") as caught, plan_checkpoint(read_checkpoint(run)):
        pass
    value = next(iter(config.values()))
    assert "README.md" in str(caught.value) or "receipt.json" in str(caught.value)
    assert str(value) not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "model.safetensors", "chat_template.jinja"])
def test_secrets_in_model_files_are_not_uploaded(name: str, run: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    path, secret = copy / "checkpoints/000002/model" / name, "sk-" + "proj" * 8
    if name.endswith("safetensors"):
        save_file(load_file(path), path, metadata={"format": "pt", "made_with": secret})
    elif name.endswith("json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "added": secret}))
    else:
        path.write_text("{# " + secret + " #}")
    with pytest.raises(HubError, match=rf"{name}, .*looks like an API key"), plan_checkpoint(read_checkpoint(copy)):
        pass


@given(
    st.lists(
        st.from_regex(r"[a-z0-9_.]{1,8}", fullmatch=True).filter(lambda x: set(x) != {"."}), min_size=1, max_size=5
    )
)
def test_absolute_paths_are_replaced_by_their_last_name(parts: list[str]) -> None:
    assert portable(f"see /{'/'.join(parts)} there") == f"see {parts[-1]} there"
    assert portable(f"https://example.org/{'/'.join(parts)}") == f"https://example.org/{'/'.join(parts)}"


def test_incomplete_checkpoints_are_refused(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    weights = copy / "checkpoints/000002/model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(HubError, match="no whole safetensors file"), plan_checkpoint(read_checkpoint(copy)):
        pass
    weights.unlink()
    with pytest.raises(HubError, match="no safetensors"), plan_checkpoint(read_checkpoint(copy)):
        pass
    with pytest.raises(HubError, match="nothing to merge"), plan_checkpoint(read_checkpoint(run), merge=True):
        pass
    with pytest.raises(HubError, match=r"no checkpoint '000003'.*best, last, 000002, 000004"):
        read_checkpoint(run, "3")
    (copy / "checkpoints/best").unlink()
    with pytest.raises(HubError, match="--checkpoint"):
        read_checkpoint(copy)
    (copy / "evaluations.jsonl").write_text('{"step": 2, "task_set": "x", "split": "y", "score": "much"}\n')
    with pytest.raises(HubError, match=r"line 1.*delete that line"):
        read_checkpoint(copy, "4")
    with pytest.raises(RunFolderError):
        read_checkpoint(tmp_path)


# -- uploaded


def test_push_makes_one_commit_and_repeating_it_none(hub: Hub, run: Path) -> None:
    argv = [sys.executable, "-c", "from clawgym.cli import main; main()", "push", "checkpoint", str(run)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    repo = hub.repos[f"{USER}/my-run"]
    assert repo.private
    assert set(repo.files) == WEIGHTS | MADE
    weights = (run / "checkpoints/000002/model/model.safetensors").read_bytes()
    assert repo.files["model.safetensors"] == weights
    assert len(repo.commits) == 2
    assert f"{hub.url}/{USER}/my-run: commit {repo.commits[-1]}" in done.stdout
    again = push(run)
    assert again.exit_code == 0, again.exception
    assert "nothing has changed" in again.output
    assert len(repo.commits) == 2
    assert len(hub.uploads) == 1


def test_failed_push_is_resumed(hub: Hub, lora: Path) -> None:
    hub.refuse = ["POST /api/models/somebody/my-lora/commit"]  # amid: the weights are there, the commit is not
    assert "run the same command again" in str(push(lora).exception)
    repo = hub.repos[f"{USER}/my-lora"]
    assert (repo.files, len(hub.uploads)) == ({}, 1)
    hub.refuse = ["PUT /lfs/"]
    assert isinstance(push(lora, "--merge").exception, HubError)  # other weights: these do not arrive
    assert (repo.files, len(hub.uploads)) == ({}, 1)
    done = push(lora)
    assert done.exit_code == 0, done.exception
    assert "adapter_model.safetensors" in repo.files
    assert len(hub.uploads) == 1, "uploaded twice"


def test_files_of_an_earlier_push_are_deleted_and_others_kept(hub: Hub, lora: Path) -> None:
    assert push(lora, "--repo", "team/it").exit_code == 0
    repo = hub.repos["team/it"]
    repo.files["NOTES.md"] = repo.files[".gitattributes"] = b"mine"
    done = push(lora, "--repo", "team/it", "--merge")
    assert done.exit_code == 0, done.exception
    assert set(repo.files) == WEIGHTS | MADE | {"NOTES.md", ".gitattributes"}
    assert len(repo.commits) == 3


def test_public_repository_needs_the_option(hub: Hub, run: Path) -> None:
    assert push(run, "--public").exit_code == 0
    repo = hub.repos[f"{USER}/my-run"]
    assert not repo.private
    assert "is public: say --public" in str(push(run).exception)
    repo.private = True
    assert push(run, "--public").exit_code == 0
    assert not repo.private


def test_missing_token_error_says_what_to_do(hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "set HF_TOKEN" in str(push(run).exception)
    assert hub.repos == {}
