# SPDX-License-Identifier: Apache-2.0
"""`hf-muon launch` and the Accelerate files in `recipes/accelerate`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hf_muon.cli.errors import UsageError
from hf_muon.cli.launch import launch_arguments, shipped_files

ROOT = Path(__file__).resolve().parents[3]
EXPECTED = {"single", "ddp", "fsdp2_z3", "fsdp2_z2", "hsdp", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"}
SCRIPT = """
import sys
from transformers import TrainingArguments
args = TrainingArguments(output_dir=sys.argv[1], optim="dmuon", use_cpu=True, report_to=[])
print("SCRIPT", sys.argv[2:], str(args.optim.value), __name__, args.world_size)
"""


def run(*words, timeout=120):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from hf_muon.cli.app import main; main()", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


def test_the_script_runs_with_the_optimizer_registered_and_its_own_arguments(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run("launch", "--cpu", "--num_processes=1", str(script), str(tmp_path), "--lr", "1e-3")
    assert done.returncode == 0, done.stderr
    assert "SCRIPT ['--lr', '1e-3'] dmuon __main__ 1" in done.stdout


def test_a_failing_script_fails_the_command(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(3)")
    assert run("launch", "--cpu", "--num_processes=1", str(script)).returncode != 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config-file", "nothing.yaml", "script.py"], "--config-file must be a file or one of"),
        (["--cpu", "missing.py"], "the script must exist; got 'missing.py'"),
        (["--no_python", "script.sh"], "--no_python must not be given"),
    ],
)
def test_wrong_words(words, message):
    with pytest.raises(UsageError, match=message):
        launch_arguments(words)


def test_usage_without_a_script():
    done = run("launch")
    assert done.returncode == 2
    assert "Usage: hf-muon launch" in done.stdout and "fsdp2_z3" in done.stdout


def test_shipped_files_by_name(tmp_path):
    assert set(shipped_files()) >= EXPECTED
    script = tmp_path / "script.py"
    script.write_text("")
    arguments = launch_arguments(["--config-file", "fsdp2_z2", str(script), "--a", "b"])
    assert arguments.config_file == str(shipped_files()["fsdp2_z2"])
    assert arguments.training_script == "hf_muon.cli.launch" and arguments.module
    assert arguments.training_script_args == [str(script), "--a", "b"]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_accelerate_itself_reads_the_files(name):
    from accelerate.commands.config.config_args import load_config_from_file

    path = shipped_files()[name]
    config = load_config_from_file(str(path))
    assert config.mixed_precision == "bf16"
    if name in ("fsdp2_z3", "fsdp2_z2", "hsdp"):
        assert config.fsdp_config["fsdp_version"] == 2
        assert config.fsdp_config["fsdp_reshard_after_forward"] is (name != "fsdp2_z2")
    header = path.read_text().splitlines()[1]
    assert header == f"# accelerate launch --config_file recipes/accelerate/{name}.yaml script.py"
    assert yaml.safe_load(path.read_text())["num_processes"] >= 1


@pytest.mark.parametrize("name", ["fsdp2_z3", "fsdp2_z2", "hsdp"])
def test_accelerate_turns_the_files_into_the_plugin_meant(name, tmp_path):
    """Accelerate's launcher fills in its defaults and sets variables; the plugin is made of those."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    words = ["--config_file", str(shipped_files()[name]), "script.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    environment = prepare_multi_gpu_env(arguments)
    assert environment["FSDP_VERSION"] == "2"
    assert environment["FSDP_RESHARD_AFTER_FORWARD"] == ("false" if name == "fsdp2_z2" else "true")
    assert environment["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"
    if name == "hsdp":
        assert environment["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] == "2"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accelerate_turns_the_deepspeed_files_into_the_plugin_meant(stage, monkeypatch):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import DeepSpeedPlugin
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    words = ["--config_file", str(shipped_files()[f"deepspeed_zero{stage}"]), "script.py"]
    arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)  # as launch_command does
    _, environment = prepare_deepspeed_cmd_env(arguments)
    for key, value in environment.items():
        if key.startswith("ACCELERATE_"):
            monkeypatch.setenv(key, value)
    plugin = DeepSpeedPlugin()
    config = plugin.deepspeed_config
    assert config["zero_optimization"]["stage"] == stage and "optimizer" not in config
    # Left to Trainer or the script, so that one file serves any batch and clipping.
    assert (config["gradient_accumulation_steps"], config["gradient_clipping"]) == ("auto", "auto")
    assert plugin.zero3_init_flag is (stage == 3)
    assert config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is (stage == 3)
