"""Fine-tunes a classifier in a plain training loop, after transformers' `run_glue_no_trainer`.

Sentences are random tokens and the weights come from a config: nothing has to be fetched.
"""

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, default_data_collator, get_scheduler


def main() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)
    sentences = [
        {"input_ids": torch.randint(100, (8,)).tolist(), "labels": number % 2} for number in range(8)
    ]
    batches = DataLoader(sentences, batch_size=4, collate_fn=default_data_collator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=len(batches))

    model.train()
    for batch in batches:
        outputs = model(**batch)
        outputs.loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    model.eval()
    right = 0
    for batch in batches:
        with torch.no_grad():
            logits = model(**batch).logits
        right += int((logits.argmax(-1) == batch["labels"]).sum())
    print(f"accuracy {right}/{len(sentences)}")


if __name__ == "__main__":
    main()
