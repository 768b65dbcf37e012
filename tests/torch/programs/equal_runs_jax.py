"""A small MLP in JAX, one compiled function a step."""

import jax
import jax.numpy as jnp

width, rows = 256, 1024


def initial(key, layers=3):
    return [jax.random.normal(part, (width, width)) / width**0.5 for part in jax.random.split(key, layers)]


def loss_of(weights, inputs, targets):
    x = inputs
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean((x - targets) ** 2)


@jax.jit
def train(weights, inputs, targets):
    loss, gradients = jax.value_and_grad(loss_of)(weights, inputs, targets)
    return loss, [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients)]


# A kernel that no other function has, so that a profile can be cut up into steps.
mark_step = jax.jit(jax.lax.population_count)

weights = initial(jax.random.key(0))
for step in range(5):
    mark_step(jnp.arange(32, dtype=jnp.int32) + step)
    keys = jax.random.split(jax.random.key(step + 1))
    inputs, targets = jax.random.normal(keys[0], (rows, width)), jax.random.normal(keys[1], (rows, width))
    loss, weights = train(weights, inputs, targets)
    print(f"step {step} loss {float(loss):.9g}")
