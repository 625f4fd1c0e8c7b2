"""Losses and gradients of one batch of supervised training, by TRL's SFTTrainer and by this project."""

import pytest
import torch

from rheostat.models.training.supervised import imitation_loss


def train_with_trl(model, processing, rows, out, **settings):
    """Return TRL's examples, its loss of one batch, and the gradients. `processing` is a tokenizer, or a processor of
    texts and images."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = {"per_device_train_batch_size": len(rows), "max_length": 4096, "shuffle_dataset": False, **settings}
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(out), use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False, **arguments
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=processing,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.eval()
    examples = [trainer.train_dataset[row] for row in range(len(trainer.train_dataset))]
    batch = trainer.data_collator(examples)
    if "input_ids" not in examples[0]:  # texts with images are encoded by the collator
        rows = zip(batch["input_ids"], batch["labels"], batch["attention_mask"].sum(1), strict=True)
        examples = [{"input_ids": ids[:n].tolist(), "labels": labels[:n].tolist()} for ids, labels, n in rows]
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    return examples, float(loss.detach()), collect_gradients(trainer.model)


def collect_gradients(model):
    return {name.removeprefix("model."): each.grad for name, each in model.named_parameters() if each.grad is not None}


def train_module(module, inputs, *, is_packed):
    """Return our loss of one batch, and the gradients."""
    weight = 1 / sum(len(each.trained_positions) for each in inputs)

    def forward(batch, *, loss_gradient):
        return module(module.prepare_inputs(batch, torch.device("cpu")))

    loss = imitation_loss(forward, inputs, weight=weight, is_packed=is_packed, device=torch.device("cpu"))
    loss.backward()
    return float(loss.detach()), collect_gradients(module.model)


def assert_same_training(theirs, ours):
    (their_loss, expected), (loss, gradients) = theirs, ours
    assert loss == pytest.approx(their_loss, abs=1e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-5)
