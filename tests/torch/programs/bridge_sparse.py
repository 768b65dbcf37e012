"""An embedding with sparse gradients: they have no bytes of their own, at one address, that could be read."""
import torch

torch.manual_seed(0)
table = torch.nn.Embedding(50, 8, sparse=True)
optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.0)
for step in range(3):
    loss = table(torch.arange(6) + step).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item().hex())
