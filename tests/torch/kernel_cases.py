"""Calls of the operations that the deterministic kernels replace: for tests on the CPU and on a GPU. Each case is a function of
a dtype that gives tensors; what it is handed has the same values in every dtype. Tensors are made on DEVICE."""
import torch
import torch.nn.functional as F

aten = torch.ops.aten
DEVICE = ["cpu"]

CASES = []  # (operation that it is to reach, or None where torch's kernel is to take it; name; function of dtype)


def case(operation, name=None):
    def put(function):
        CASES.append((operation, name or function.__name__, function))
        return function

    return put


def values(dtype, *shape, seed=0):
    generator = torch.Generator("cpu").manual_seed(seed + sum(shape))
    made = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return made.to(torch.bfloat16).to(dtype).to(DEVICE[0])


def numbers(high, *shape, seed=1, low=0):
    generator = torch.Generator("cpu").manual_seed(seed + sum(shape))
    return torch.randint(low, high, shape, generator=generator, device="cpu").to(DEVICE[0])


# ---- Adding by index

def add_index_cases():
    for lengths, dim, count in (((5, 7), 0, 400), ((5, 7), 1, 9), ((3, 4, 65), 1, 300), ((6,), 0, 1000), ((2, 3, 4), -1, 11),
                                ((4, 1), 0, 3), ((9, 16), 0, 1)):
        for kind in ("uniform", "one", "each"):
            def run(dtype, lengths=lengths, dim=dim, count=count, kind=kind, form="index_add"):
                self = values(dtype, *lengths)
                rows = lengths[dim]
                index = {"uniform": numbers(rows, count), "one": torch.full((count,), rows - 1),
                         "each": torch.arange(count) % rows}[kind]
                shape = list(lengths)
                shape[dim] = count
                source = values(dtype, *shape, seed=5)
                if form == "index_add_":
                    return self.index_add_(dim, index, source, alpha=-1.5)
                if form == "index_add.out":
                    return torch.index_add(self, dim, index, source, out=torch.empty(0, dtype=dtype))
                return torch.index_add(self, dim, index.int(), source, alpha=0.5)

            for form in ("index_add", "index_add_", "index_add.out"):
                case(form, f"{form} {lengths} along {dim}, {count} {kind}")(
                    lambda dtype, run=run, form=form: run(dtype, form=form))


add_index_cases()


@case("index_add_")
def index_add_into_a_transposed_view(dtype):
    self = values(dtype, 6, 5)
    view = self.t()
    same = view.index_add_(0, numbers(5, 40), values(dtype, 40, 6).mul(2))
    assert same is view
    return self


@case("index_add_")
def index_add_into_every_second_column(dtype):
    self = values(dtype, 6, 10)
    self[:, ::2].index_add_(0, numbers(6, 40), values(dtype, 40, 5))
    return self


@case("index_add")
def index_add_of_a_transposed_tensor(dtype):
    return torch.index_add(values(dtype, 6, 5).t(), 0, numbers(5, 40), values(dtype, 6, 40).t())


@case("index_add")
def index_add_with_its_gradients(dtype):
    self, source = values(dtype, 6, 5).requires_grad_(), values(dtype, 40, 5).requires_grad_()
    torch.index_add(self, 0, numbers(6, 40), source, alpha=2).square().sum().backward()
    return self.grad, source.grad


@case("index_add_")
def index_select_backward(dtype):
    self = values(dtype, 4, 30, 3).requires_grad_()
    (self.index_select(1, numbers(30, 500)) * values(dtype, 4, 500, 3)).sum().backward()
    return self.grad


@case(None)
def index_add_of_nothing(dtype):
    return torch.index_add(values(dtype, 3, 2), 0, numbers(3, 0), values(dtype, 0, 2)), torch.index_add(
        values(dtype, 0, 2), 0, numbers(3, 0), values(dtype, 0, 2))


@case(None)
def index_add_of_integers(dtype):
    return torch.index_add(numbers(9, 4, 3), 0, numbers(4, 50), numbers(9, 50, 3))


@case("scatter_add_")
def gather_backward(dtype):
    self = values(dtype, 8, 20).requires_grad_()
    (self.gather(1, numbers(20, 8, 90)) * values(dtype, 8, 90)).sum().backward()
    return self.grad


@case("scatter_add_")
def gather_backward_of_one_class_a_row(dtype):
    self = values(dtype, 5, 6, 20).requires_grad_()
    (self.gather(2, numbers(20, 5, 6, 1)) * values(dtype, 5, 6, 1)).sum().backward()
    return self.grad


def scatter_cases():
    for form in ("scatter_add", "scatter_add_", "scatter_add.out"):
        for lengths, index, dim in (((5, 7), (40, 7), 0), ((5, 7), (40, 3), 0), ((5, 7), (5, 90), 1), ((4, 7), (2, 90), 1),
                                    ((6,), (900,), 0), ((3, 4, 5), (3, 50, 5), 1), ((3, 4, 5), (2, 50, 2), -2),
                                    ((3, 4, 5), (3, 4, 1), 2), ((3, 4, 5), (3, 1, 5), 1), ((2, 1), (2, 1), 0)):
            def run(dtype, form=form, lengths=lengths, index=index, dim=dim):
                at = numbers(lengths[dim], *index)
                src = values(dtype, *(n + 1 for n in index))
                if form == "scatter_add":
                    return torch.scatter_add(values(dtype, *lengths), dim, at, src)
                if form == "scatter_add_":
                    return values(dtype, *lengths).scatter_add_(dim, at, src)
                return torch.scatter_add(values(dtype, *lengths), dim, at, src, out=torch.empty(0, dtype=dtype))

            case(form, f"{form} {lengths} {index} along {dim}")(run)


scatter_cases()


@case("scatter_add_")
def scatter_add_of_a_spread_index(dtype):
    index = numbers(7, 300).view(1, -1, 1).expand(4, -1, 6)
    return values(dtype, 4, 7, 6).scatter_add_(1, index, values(dtype, 4, 300, 6))


@case("scatter_add_")
def scatter_add_of_whole_rows(dtype):
    index = numbers(7, 300).view(-1, 1, 1).expand(-1, 6, 5)
    return values(dtype, 7, 6, 5).scatter_add_(0, index, values(dtype, 300, 6, 5))


@case("scatter_add_")
def scatter_add_of_elements(dtype):
    return values(dtype, 7, 6, 5).scatter_add_(0, numbers(7, 300, 6, 5), values(dtype, 300, 6, 5))


@case("scatter_add_")
def scatter_add_of_parts_of_rows(dtype):
    index = numbers(7, 300, 6).unsqueeze(2).expand(-1, -1, 5)
    return values(dtype, 7, 6, 5).scatter_add_(0, index, values(dtype, 300, 6, 5))


@case("index_add_")
def index_add_of_a_row_that_is_its_own(dtype):
    self = values(dtype, 6, 5)
    return self.index_add_(0, numbers(6, 6), self.clone()), self[:3].index_add_(0, numbers(3, 3), self[3:].clone())


@case("scatter_add_")
def scatter_add_of_an_index_spread_over_columns(dtype):
    index = numbers(7, 4, 300).unsqueeze(2).expand(-1, -1, 6)
    return values(dtype, 4, 7, 6).scatter_add_(1, index, values(dtype, 4, 300, 6))


@case("scatter_add_")
def scatter_add_of_an_index_spread_over_some_columns(dtype):
    index = numbers(7, 4, 300).unsqueeze(2).expand(-1, -1, 3)
    return values(dtype, 4, 7, 6).scatter_add_(1, index, values(dtype, 4, 300, 6))


def reduce_cases():
    for reduce in ("sum", "mean", "prod"):
        for self_too in (True, False):
            for form in ("scatter_reduce.two", "scatter_reduce_.two", "scatter_reduce.two_out"):
                def run(dtype, reduce=reduce, self_too=self_too, form=form):
                    at, src, self = numbers(9, 30, 4), values(dtype, 30, 4), values(dtype, 11, 4)
                    if reduce == "prod":
                        src, self = src.sign() * (1 + src.abs() / 8), self.sign()
                    if form == "scatter_reduce_.two":
                        return self.scatter_reduce_(0, at, src, reduce, include_self=self_too)
                    if form == "scatter_reduce.two_out":
                        return aten.scatter_reduce.two_out(self, 0, at, src, reduce, include_self=self_too,
                                                           out=torch.empty(0, dtype=dtype))
                    return torch.scatter_reduce(self, 0, at, src, reduce, include_self=self_too)

                case(form, f"{form} {reduce} {'with' if self_too else 'without'} self")(run)


reduce_cases()


def old_reduce_cases():
    for reduce in ("add", "multiply"):
        for form in ("scatter.reduce", "scatter_.reduce", "scatter.reduce_out"):
            def run(dtype, reduce=reduce, form=form):
                at, src, self = numbers(9, 30, 4), values(dtype, 30, 4), values(dtype, 11, 4).sign()
                if reduce == "multiply":
                    src = src.sign() * (1 + src.abs() / 8)
                if form == "scatter_.reduce":
                    return self.scatter_(0, at, src, reduce=reduce)
                if form == "scatter.reduce_out":
                    return aten.scatter.reduce_out(self, 0, at, src, reduce=reduce, out=torch.empty(0, dtype=dtype))
                return torch.scatter(self, 0, at, src, reduce=reduce)

            case(form, f"{form} {reduce}")(run)
    for reduce in ("mean", "prod"):
        for self_too in (True, False):
            for form in ("index_reduce", "index_reduce_"):
                def run_lines(dtype, reduce=reduce, self_too=self_too, form=form):
                    at, src, self = numbers(4, 9), values(dtype, 3, 9, 5), values(dtype, 3, 6, 5).sign()
                    if reduce == "prod":
                        src = src.sign() * (1 + src.abs() / 8)
                    call = self.index_reduce_ if form == "index_reduce_" else self.index_reduce
                    return call(1, at, src, reduce, include_self=self_too)

                case(form, f"{form} {reduce} {'with' if self_too else 'without'} self")(run_lines)


old_reduce_cases()


@case(None)
def scatter_reduce_amax(dtype):
    return torch.scatter_reduce(values(dtype, 11, 4), 0, numbers(9, 30, 4), values(dtype, 30, 4), "amax")


def put_cases():
    def add(dtype, lengths, indices, shape):
        self = values(dtype, *lengths)
        indices = [index if index is None else index.to(DEVICE[0]) for index in indices]
        assert aten.index_put_(self, indices, values(dtype, *shape, seed=3), True) is self
        return self

    for name, lengths, indices, shape in (
            ("rows", (6, 5), (numbers(6, 300),), (300, 5)), ("negative rows", (6, 5), (numbers(6, 300, low=-6),), (300, 5)),
            ("elements", (6, 5), (numbers(6, 300), numbers(5, 300)), (300,)),
            ("columns", (6, 5), (None, numbers(5, 70)), (6, 70)), ("middle", (3, 6, 5), (None, numbers(6, 70)), (3, 70, 5)),
            ("one value", (6, 5), (numbers(6, 300),), ()), ("a row for all", (6, 5), (numbers(6, 30, 2),), (5,)),
            ("indices that spread", (6, 5, 4), (numbers(6, 30, 1), numbers(5, 20)), (30, 20, 4)),
            ("32-bit", (6, 5), (numbers(6, 300).int(),), (300, 5))):
        case("_index_put_impl_", f"index_put {name}")(
            lambda dtype, lengths=lengths, indices=indices, shape=shape: add(dtype, lengths, indices, shape))
    case(None, "index_put apart")(lambda dtype: add(dtype, (3, 4, 5), (numbers(3, 40), None, numbers(5, 40)), (40, 4)))
    case(None, "index_put mask")(lambda dtype: add(dtype, (6, 5), (torch.arange(6) % 2 == 0,), (3, 5)))
    case(None, "index_put instead")(
        lambda dtype: values(dtype, 6, 5).index_put_((torch.tensor([3, 1]),), values(dtype, 2, 5)))


put_cases()


@case("_index_put_impl_")
def indexing_backward(dtype):
    self = values(dtype, 7, 6, 5).requires_grad_()
    (self[numbers(7, 200, low=-7), numbers(6, 200)] * values(dtype, 200, 5)).sum().backward()
    return self.grad


@case("put_")
def put_accumulating(dtype):
    return values(dtype, 6, 5).put_(numbers(30, 20, 20, low=-30), values(dtype, 20, 20), accumulate=True)


@case("put_")
def put_the_last_value(dtype):
    return values(dtype, 6, 5).t().put_(numbers(30, 200), values(dtype, 200))


@case("put_")
def take_backward(dtype):
    self = values(dtype, 6, 5).requires_grad_()
    (self.take(numbers(30, 200)) * values(dtype, 200)).sum().backward()
    return self.grad


# ---- Embeddings

def embedding_cases():
    for padding in (None, 3, -1):
        for frequency in (False, True):
            def run(dtype, padding=padding, frequency=frequency):
                weight = values(dtype, 11, 12).requires_grad_()
                out = F.embedding(numbers(9, 7, 40), weight, padding_idx=padding, scale_grad_by_freq=frequency)
                (out * values(dtype, 7, 40, 12)).sum().backward()
                return weight.grad

            case("embedding_dense_backward", f"embedding padding {padding} frequency {frequency}")(run)


embedding_cases()


@case("_embedding_bag_dense_backward")
def embedding_bag_max(dtype):
    weight = values(dtype, 11, 12).requires_grad_()
    out = F.embedding_bag(numbers(11, 200), weight, torch.tensor([0, 30, 30, 60, 199]), mode="max")
    (out * values(dtype, 5, 12)).sum().backward()
    return weight.grad


# ---- Counts, losses, medians

@case("bincount")
def bincount_with_weights(dtype):
    return torch.bincount(numbers(9, 4000), values(dtype, 4000), minlength=12), torch.bincount(
        numbers(9, 4000), values(dtype, 4000))


@case(None)
def bincount_of_numbers_alone(dtype):
    return torch.bincount(numbers(9, 400))


@case("histc")
def histogram(dtype):
    if dtype in (torch.bfloat16, torch.float16):
        return ()
    edges = torch.tensor([-1.0, 1.0, 0.5, 1.5, float("nan"), -1.5], dtype=dtype)
    return torch.histc(torch.cat([values(dtype, 5000), edges]), 17, -1, 1), torch.histc(edges[:4], 4, min=-1, max=1)


@case("histc.out")
def histogram_into(dtype):
    if dtype in (torch.bfloat16, torch.float16):
        return ()
    return torch.histc(values(dtype, 5000), 8, -2, 2, out=torch.empty(0, dtype=dtype))


def nll_cases():
    for reduction in ("mean", "sum", "none"):
        for weighted in (False, True):
            def run(dtype, reduction=reduction, weighted=weighted):
                scores = values(dtype, 3, 5, 4, 6).requires_grad_()
                target = numbers(5, 3, 4, 6)
                target[0, 0, :3] = -100
                weight = values(dtype, 5).abs() + 0.5 if weighted else None
                loss = F.nll_loss(scores, target, weight, reduction=reduction)
                (loss * 2).sum().backward()
                return loss.detach(), scores.grad

            for operation in ("nll_loss2d_forward", "nll_loss2d_backward"):
                case(operation, f"{operation} {reduction} weighted {weighted}")(run)


nll_cases()


def ctc_cases():
    times, lengths = [14, 9, 14, 3], [5, 4, 0, 3]
    for form in ("padded", "joined", "tensors"):
        for blank in (0, 2):
            def run(dtype, form=form, blank=blank):
                if dtype in (torch.bfloat16, torch.float16):
                    return ()
                scores = values(dtype, 14, 4, 6).requires_grad_()
                targets = numbers(5, 4, 5)
                targets = targets + (targets >= blank).long()
                targets[3, 1] = targets[3, 0]  # more than fits into 3 steps: no such path
                if form == "joined":
                    targets = torch.cat([row[:n] for row, n in zip(targets, lengths)])
                given = (torch.tensor(times), torch.tensor(lengths)) if form == "tensors" else (tuple(times), tuple(lengths))
                loss = F.ctc_loss(scores.log_softmax(2), targets, *given, blank, "none", zero_infinity=True)
                (loss * values(dtype, 4)).sum().backward()
                return scores.grad

            case("_ctc_loss_backward", f"ctc {form} blank {blank}")(run)


ctc_cases()


@case("median.dim_values")
def median_values(dtype):
    self = values(dtype, 5, 8, 9)
    with_nan = self.clone()
    with_nan[1, 2, 3] = with_nan[1, 2, 7] = float("nan")
    return self.median(1).values, self.median(-1, keepdim=True).values, with_nan.median(2).values


@case("median.dim_values")
def median_indices(dtype):
    self = (torch.arange(7 * 9) * 5 % (7 * 9)).view(7, 9).to(dtype)  # no two are equal, in any dtype
    return self.median(1).indices, self.median(0).indices, numbers(1000, 1, 5)[0].median(0).values


@case("nanmedian.dim_values")
def nanmedian(dtype):
    self = values(dtype, 5, 9)
    self[1, 2] = self[1, 3] = self[4] = float("nan")
    return self.nanmedian(1).values
