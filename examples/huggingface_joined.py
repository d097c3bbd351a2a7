"""Join Hugging Face's Trainer to a hub: `python huggingface_joined.py tcp://HUB:5555 NAME STATE_FOLDER`."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

import sys

import numpy as np
import torch
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import edgeasync

torch.manual_seed(0)
config = BertConfig(
    vocab_size=32,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=12,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertForSequenceClassification(config)
words = torch.from_numpy(np.random.default_rng(0).integers(2, 32, (1200, 12)))
sorts = (words[:, 0] > 16).long()  # whether the first word is in the upper half
arguments = TrainingArguments(
    output_dir="unused",
    num_train_epochs=10,
    per_device_train_batch_size=32,
    learning_rate=0.003,
    save_strategy="no",
    report_to="none",
    logging_strategy="no",
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=TensorDataset(words[:1000], sorts[:1000]),
    data_collator=lambda rows: {
        "input_ids": torch.stack([row[0] for row in rows]),
        "labels": torch.stack([row[1] for row in rows]),
    },
)
address, name, state = sys.argv[1:]
with edgeasync.join(address, model, name=name, state=state) as session:
    trainer.train()
model.eval()
with torch.no_grad():
    accuracy = float((model(words[1000:]).logits.argmax(1) == sorts[1000:]).float().mean())
print(f"step {session.steps}, {trainer.state.global_step} here, accuracy: {accuracy:.4f}")
