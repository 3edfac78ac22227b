"""Continue prompts with a LLaMA split over devices, heads and cache alike, on a virtual mesh or on ranks.

python -m examples.llama_generate --devices 2
torchrun --nproc-per-node 2 -m examples.llama_generate
python -m examples.llama_generate --model FOLDER --prompt "Once upon a time"    a LLaMA of transformers
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh

import mesh_tensor as mt
from kernels.models import llama, llama_decoder

CONFIG = llama.Config(vocabulary=256, width=64, hidden=128, heads=8, key_heads=4, layers=2, batch=2, positions=64)
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
TRANSFORMERS = {
    **{f"*.{name}.weight": {"model": 0} for name in COLUMNS},
    **{f"*.{name}.weight": {"model": 1} for name in ("o_proj", "down_proj")},
    **{f"{what}_*": {"model": 1} for what in ("keys", "values")},
}


def mesh_of(devices: int) -> object:
    """The ranks of torchrun, or a virtual mesh."""
    if torch.distributed.is_initialized():
        return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("model",))
    return {"model": devices}


def byte_model() -> tuple[llama.Llama, mt.ImportedModule]:
    """A small model of bytes with random weights, and as a module."""
    torch.manual_seed(0)
    model = llama.build(CONFIG)
    return model, mt.from_torch(llama_decoder.export(model, CONFIG))


def on_mesh(module: mt.ImportedModule, devices: int) -> mt.MeshModule:
    """The module of bytes on so many virtual devices, or on the ranks of torchrun."""
    return mt.distribute_module(module, mesh_of(devices), llama_decoder.layout(CONFIG, "model"))


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of equal length, filled with 0 on their left, and where they are ids."""
    length = max(map(len, rows))
    ids = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def main() -> None:
    """Print what follows the prompts."""
    parser = argparse.ArgumentParser(prog="python -m examples.llama_generate")
    parser.add_argument("--devices", type=int, default=2, help="of the virtual mesh")
    parser.add_argument("--model", help="a folder with a LLaMA of transformers")
    parser.add_argument("--prompt", action="append", help="may be given more than once")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    prompts = options.prompt or ["Once upon a time", "The mesh"]
    if options.model:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(options.model).eval()
        ids, mask = padded([tokenizer(prompt)["input_ids"] for prompt in prompts])
        module = mt.from_transformers(model, len(prompts), ids.shape[1] + options.tokens)
        run = mt.distribute_module(module, mesh_of(options.devices), TRANSFORMERS)
    else:
        prompts = (prompts * CONFIG.batch)[: CONFIG.batch]
        ids, mask = padded([list(prompt.encode()) for prompt in prompts])
        run = on_mesh(byte_model()[1], options.devices)
    made = mt.generate(run, ids, options.tokens, attention_mask=mask, temperature=options.temperature)
    if int(os.environ.get("RANK", 0)) == 0:
        for row in made[:, ids.shape[1] :].tolist():
            print(tokenizer.decode(row) if options.model else bytes(row))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
