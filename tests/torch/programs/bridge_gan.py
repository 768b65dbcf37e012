"""Two models, two optimizers, a third model without gradients: each step trains the critic and then the maker."""
import torch
from torch import nn

from bridge_gpt import bits, hash_of


class Maker(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, noise):
        return self.net(noise)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(2, 8)
        self.fc2 = nn.Linear(8, 1)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))


if __name__ == "__main__":
    torch.manual_seed(0)
    maker, critic = Maker(), Critic()
    teacher = Critic().eval()
    of_maker = torch.optim.Adam(maker.parameters(), lr=1e-2)
    of_critic = torch.optim.SGD(critic.parameters(), lr=1e-2)
    criterion = nn.BCEWithLogitsLoss()
    for step in range(4):
        real, noise = torch.randn(5, 2), torch.randn(5, 4)
        with torch.no_grad():
            target = torch.sigmoid(teacher(real))
        of_critic.zero_grad()
        loss = criterion(critic(real), target) + criterion(critic(maker(noise).detach()), torch.zeros(5, 1))
        loss.backward()
        of_critic.step()
        of_maker.zero_grad()
        other = criterion(critic(maker(noise)), torch.ones(5, 1))
        other.backward()
        of_maker.step()
        print(f"step {step} loss {bits(loss.item())} {bits(other.item())}", flush=True)
    print("weights", hash_of(maker), hash_of(critic), flush=True)
