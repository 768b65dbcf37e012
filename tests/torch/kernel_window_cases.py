"""As kernel_cases: backward passes of pooling, padding, interpolation and grid_sample. Importing it adds them to CASES."""
import torch
import torch.nn.functional as F

from kernel_cases import aten, case, numbers, values


def backward_of(shape, function, channels_last=False):
    def run(dtype):
        self = values(dtype, *shape)
        if channels_last:
            self = self.contiguous(memory_format=torch.channels_last)
        self.requires_grad_()
        out = function(self)
        grad = values(dtype, *out.shape, seed=4)
        if channels_last:
            grad = grad.contiguous(memory_format=torch.channels_last)
        return torch.autograd.grad(out, self, grad)

    return run


def window_cases():
    for mode, word in (("reflect", "reflection"), ("replicate", "replication")):
        for shape, padding in (((2, 3, 7), (3, 2)), ((3, 7), (0, 5)), ((2, 3, 7, 6), (3, 2, 5, 1)), ((3, 7, 6), (1, 0, 0, 3)),
                               ((2, 3, 7, 6, 5), (3, 2, 1, 1, 4, 2)), ((2, 3, 70, 6), (2, 2, 9, 9))):
            case(f"{word}_pad{len(padding) // 2}d_backward", f"{word} {shape} {padding}")(
                backward_of(shape, lambda x, padding=padding, mode=mode: F.pad(x, padding, mode)))
    for shape, size in (((2, 3, 7, 9), (3, 4)), ((3, 7, 9), (7, 2)), ((2, 3, 5, 5), (8, 3))):
        case("_adaptive_avg_pool2d_backward", f"adaptive average {shape} {size}")(
            backward_of(shape, lambda x, size=size: F.adaptive_avg_pool2d(x, size)))
        case("adaptive_max_pool2d_backward", f"adaptive maximum {shape} {size}")(
            backward_of(shape, lambda x, size=size: F.adaptive_max_pool2d(x, size)))
    for shape, size in (((2, 3, 7, 9, 6), (3, 4, 5)), ((3, 7, 9, 4), (7, 2, 3))):
        case("_adaptive_avg_pool3d_backward", f"adaptive average {shape} {size}")(
            backward_of(shape, lambda x, size=size: F.adaptive_avg_pool3d(x, size)))
        case("adaptive_max_pool3d_backward", f"adaptive maximum {shape} {size}")(
            backward_of(shape, lambda x, size=size: F.adaptive_max_pool3d(x, size)))
    for arguments in ({"kernel_size": 3}, {"kernel_size": 3, "stride": 1}, 
                      {"kernel_size": (2, 3, 4), "stride": (1, 2, 2), "padding": (1, 1, 2)},
                      {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
                      {"kernel_size": 3, "padding": 1, "count_include_pad": False},
                      {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True, "count_include_pad": False},
                      {"kernel_size": 2, "divisor_override": 5}):
        for shape in ((2, 3, 7, 9, 8), (3, 7, 9, 8)):
            case("avg_pool3d_backward", f"average {shape} {arguments}")(
                backward_of(shape, lambda x, arguments=arguments: F.avg_pool3d(x, **arguments)))
    for arguments in ({"kernel_size": 2}, {"kernel_size": 3, "stride": 1, "padding": 1}, 
                      {"kernel_size": 3, "stride": 2, "dilation": 2}):
        case("max_pool3d_with_indices_backward", f"maximum {arguments}")(
            backward_of((2, 3, 7, 9, 8), lambda x, arguments=arguments: F.max_pool3d(x, **arguments)))
        for last in (False, True):
            case("max_pool2d_with_indices_backward", f"maximum {arguments} channels last {last}")(
                backward_of((2, 3, 9, 8), lambda x, arguments=arguments: F.max_pool2d(x, **arguments), last))
    samples = (numbers(3, 2, 3, 3) + 1) / 4
    case("fractional_max_pool2d_backward", "fractional 2d")(backward_of((2, 3, 9, 8), lambda x: F.fractional_max_pool2d(
        x, 3, (5, 4), _random_samples=samples[..., :2].to(x))))
    case("fractional_max_pool3d_backward", "fractional 3d")(backward_of((2, 3, 9, 8, 7), lambda x: F.fractional_max_pool3d(
        x, 2, (5, 4, 4), _random_samples=samples.to(x))))


window_cases()


def unpool(count):
    shape = (2, 3, 4, 5, 3)[:2 + count]

    def run(dtype):
        self = values(dtype, *shape)
        size = tuple(2 * n for n in shape[2:])
        # Several to one place: the last stays. Torch's CPU kernel keeps that on one thread alone.
        places = numbers(torch.Size(size).numel() // 6, *shape)
        if count == 2:
            return aten.max_unpool2d(self, places, size)
        return aten.max_unpool3d(self, places, size, (2, 2, 2), (0, 0, 0))

    return run


case("max_unpool2d", "unpooling 2d")(unpool(2))
case("max_unpool3d", "unpooling 3d")(unpool(3))


def resize_cases():
    sizes = {"linear": (((2, 3, 9), 23), ((2, 3, 9), 4), ((2, 3, 9), 9)),
             "bilinear": (((2, 3, 9, 8), (23, 5)), ((2, 3, 9, 8), (4, 20)), ((2, 3, 1, 8), (4, 1)), ((2, 3, 80, 8), (40, 80))),
             "bicubic": (((2, 3, 9, 8), (23, 5)), ((2, 3, 9, 8), (4, 20)), ((2, 3, 2, 8), (4, 1))),
             "trilinear": (((2, 3, 5, 4, 3), (7, 9, 2)), ((1, 2, 6, 7, 5), (3, 3, 3)))}
    names = {"linear": "upsample_linear1d", "bilinear": "upsample_bilinear2d", "bicubic": "upsample_bicubic2d",
             "trilinear": "upsample_trilinear3d"}
    for mode, shapes in sizes.items():
        for shape, size in shapes:
            for corners in (False, True):
                case(names[mode] + "_backward", f"{mode} {shape} {size} corners {corners}")(backward_of(
                    shape, lambda x, size=size, mode=mode, corners=corners: F.interpolate(
                        x, size, mode=mode, align_corners=corners)))
                if mode in ("bilinear", "bicubic"):
                    case("_" + names[mode] + "_aa_backward", f"{mode} smooth {shape} {size} corners {corners}")(backward_of(
                        shape, lambda x, size=size, mode=mode, corners=corners: F.interpolate(
                            x, size, mode=mode, align_corners=corners, antialias=True)))
    for mode, factor in (("bilinear", (1.7, 0.6)), ("bicubic", (2.3, 1.0))):
        case(names[mode] + "_backward", f"{mode} by {factor}")(backward_of(
            (2, 3, 9, 8), lambda x, mode=mode, factor=factor: F.interpolate(
                x, scale_factor=factor, mode=mode, recompute_scale_factor=False)))
    case("upsample_bilinear2d_backward", "bilinear channels last")(
        backward_of((2, 3, 9, 8), lambda x: F.interpolate(x, (17, 5), mode="bilinear"), True))


resize_cases()


def grid_cases():
    for shape, out in (((2, 3, 6, 7), (5, 9)), ((2, 3, 1, 4), (3, 3)), ((2, 2, 4, 5, 6), (3, 4, 5))):
        for mode in ("bilinear", "nearest"):
            for padding in ("zeros", "border", "reflection"):
                for corners in (False, True):
                    def run(dtype, shape=shape, out=out, mode=mode, padding=padding, corners=corners):
                        self = values(dtype, *shape).requires_grad_()
                        grid = values(dtype, shape[0], *out, len(out), seed=8).requires_grad_()
                        result = F.grid_sample(self, grid, mode, padding, corners)
                        return torch.autograd.grad(result, (self, grid), values(dtype, *result.shape, seed=4))

                    case(f"grid_sampler_{len(out)}d_backward", f"grid {shape} {mode} {padding} corners {corners}")(run)


grid_cases()


# ---- What torch does in a fixed order by itself: on a GPU two runs must be equal, and a warning is listed

def plain_cases():
    for name, shape, function in (
            ("cumsum of one line", (70000,), lambda x: x.cumsum(0)), ("cumsum", (40, 900), lambda x: x.cumsum(1)),
            ("cumprod", (40, 30), lambda x: x.sign().cumprod(1)),
            ("nearest", (2, 3, 9, 8), lambda x: F.interpolate(x, (20, 5))),
            ("average 2d", (2, 3, 9, 8), lambda x: F.avg_pool2d(x, 3, 1)),
            ("unfold", (2, 3, 9, 8), lambda x: F.unfold(x, 3)), ("windows", (90,), lambda x: x.unfold(0, 7, 3)),
            ("constant pad", (2, 3, 9), lambda x: F.pad(x, (2, 3))),
            ("circular pad", (2, 3, 9), lambda x: F.pad(x, (2, 3), "circular")),
            ("repeat_interleave", (30, 4), lambda x: x.repeat_interleave(numbers(9, 30), 0)),
            ("kthvalue", (30, 41), lambda x: x.kthvalue(7, 1).values), ("maximum", (30, 41), lambda x: x.max(1).values),
            ("masked_select", (30, 41), lambda x: x.masked_select(x > 0)),
            ("distances", (30, 5), lambda x: torch.cdist(x, x + 1)),
            ("cross entropy", (300, 40), lambda x: F.cross_entropy(x, numbers(40, 300), label_smoothing=0.1)),
            ("layer norm", (300, 40), lambda x: F.layer_norm(x, (40,))),
            ("batch norm", (30, 4, 50), lambda x: F.batch_norm(x, None, None, training=True)),
            ("group norm", (30, 4, 50), lambda x: F.group_norm(x, 2)),
            ("shuffle", (2, 8, 5, 6), lambda x: F.pixel_shuffle(x, 2))):
        case(None, "torch's own " + name)(backward_of(shape, function))


plain_cases()
