"""Lightning's Trainer on an offloaded model; only the line with `offload.attach` is ours.

It needs `pip install -e 'CLONE[models]'`, and trains a small GPT on Python's own source.
"""

import sysconfig
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import offload
from cpu_adam import CPUAdam

WIDTH, LENGTH, STEPS = 128, 128, 30


class Bytes(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens.device)
        x = self.embed(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


class Lit(lightning.LightningModule):
    def __init__(self, config):
        super().__init__()
        self.model, self.config, self.adam = Bytes(), config, None

    def configure_model(self):
        """Lightning calls this before it moves the model to the device, where it may not fit."""
        if self.adam is None:
            # torch.optim.AdamW would do as well; this has the same bits with and without offload.
            adam = CPUAdam(self.model.parameters(), lr=2e-3, weight_decay=0.1)
            if self.config is not None:
                _, adam = offload.attach(self.model, adam, self.config)
            self.adam = lambda: adam  # A function: some callbacks copy the module and all it holds.

    def configure_optimizers(self):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(self.adam(), 2e-3, total_steps=STEPS)
        each_step = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": self.adam(), "lr_scheduler": each_step}

    def loss(self, tokens):
        return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, tokens, index):
        loss = self.loss(tokens)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, tokens, index):
        self.log("held_out", self.loss(tokens), prog_bar=True)

    def cpu(self):
        """Lightning moves a model off the device when it is done; this one is where it belongs."""
        return self


def batches(name):
    text = (Path(sysconfig.get_path("stdlib")) / name).read_bytes()
    pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().split(LENGTH + 1)[:-1]
    return DataLoader(pieces, batch_size=4)


def train(config, *, resume=None, **options):
    """Train with `config`, or without offload where it is None; the Trainer, when it is done."""
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        val_check_interval=20,
        enable_checkpointing=False,
        logger=False,
        **options,
    )
    trainer.fit(Lit(config), batches("argparse.py"), batches("bisect.py"), ckpt_path=resume)
    return trainer


if __name__ == "__main__":
    placed = offload.Config(params="cpu", gradients="cpu", optimizer="nvme", nvme_path=".")
    train(placed)
