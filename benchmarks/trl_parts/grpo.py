"""TRL's side, in an interpreter that has it: `python grpo.py SETTINGS`, where SETTINGS is JSON.

Prints a line of JSON per step: the moment at which it ended, and the mean length of its replies.
"""

import json
import sys
import time
from typing import Any

from datasets import Dataset
from stories import PROMPTS, score
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]


class Clock(TrainerCallback):  # type: ignore[misc]
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "num_tokens" in logs:
            print(json.dumps({"time": time.time(), "length": logs["completions/mean_length"]}), flush=True)


def letters(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    return [score(completion[0]["content"]) for completion in completions]


def main() -> None:
    given = json.loads(sys.argv[1])
    cuda = given["device"] == "cuda"
    settings = GRPOConfig(
        output_dir=given["folder"],
        max_steps=given["steps"],
        per_device_train_batch_size=given["micro_batch"],
        gradient_accumulation_steps=given["replies"] // given["micro_batch"],
        num_generations=given["group"],
        max_completion_length=given["tokens"],
        learning_rate=2e-5,
        bf16=cuda,
        use_cpu=not cuda,
        use_vllm=cuda,
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=given["tokens"] + 128,
        gradient_checkpointing=given["checkpointing"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    dtype = "bfloat16" if cuda else "float32"
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(given["model"], dtype=dtype),
        processing_class=AutoTokenizer.from_pretrained(given["model"]),
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": prompt}]} for prompt in PROMPTS]),
        reward_funcs=letters,
        callbacks=[Clock()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
