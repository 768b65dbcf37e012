"""A text, byte by byte, in an order that follows from the seed; how far it was read is one number, which checkpoints hold."""

import pathlib

import torch


class Bytes:
    """Sequences of a file's bytes, each epoch in another order."""

    VOCABULARY = 256

    def __init__(self, path, seq_length, seed):
        self.bytes = torch.frombuffer(bytearray(pathlib.Path(path).read_bytes()), dtype=torch.uint8).long()
        self.seq_length, self.seed = seq_length, seed
        self.count = (len(self.bytes) - 1) // seq_length
        if self.count < 1:
            raise SystemExit(f"{path} holds fewer than {seq_length + 1} bytes")
        self.epoch, self.order = -1, None

    def sample(self, index):
        """(tokens, labels) of the index-th sequence since training began."""
        epoch, place = divmod(index, self.count)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self.epoch, self.order = epoch, torch.randperm(self.count, generator=generator).tolist()
        first = self.order[place] * self.seq_length
        return self.bytes[first : first + self.seq_length], self.bytes[first + 1 : first + self.seq_length + 1]


class Reader:
    """What one data-parallel rank is handed: micro-batch after micro-batch, without end."""

    def __init__(self, dataset, args, place):
        self.dataset, self.args, self.place = dataset, args, place
        self.consumed = 0  # sequences, of all data-parallel ranks, at the beginning of the iteration

    def microbatches(self):
        """Of one iteration."""
        size, stride = self.args.micro_batch_size, self.args.micro_batch_size * self.args.dp
        for first in range(self.consumed, self.consumed + self.args.global_batch_size, stride):
            begin = first + self.place * size
            pairs = [self.dataset.sample(i) for i in range(begin, begin + size)]
            tokens, labels = (torch.stack(part).cuda() for part in zip(*pairs))
            yield tokens, labels

    def iteration_ended(self):
        self.consumed += self.args.global_batch_size
