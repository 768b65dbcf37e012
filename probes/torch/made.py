"""Which modules there are, called or not, and numbers for what has one name."""
import functools
import gc
import itertools
import sys
import weakref

collecting = [False]  # the garbage collector is at work
modules = {}          # id of a module that holds parameters or others -> (weak module, number among those of its class)
fresh = {}            # ids of those that came, or got a part, since somebody looked


def unless_at_the_end(function, *arguments, is_finalizing=sys.is_finalizing):
    """A weak reference's callback that calls function(*arguments). Not when the interpreter is being taken down: our globals are
    None by then, and what would be raised is printed among what the program prints."""
    def gone(_):
        if not is_finalizing():
            function(*arguments)

    return gone


class Numbers:
    """Tells apart what has one name: the least number from 1 that is free. A number is free again when its owner went
    with the last reference to it, which is at one place in the program. What the garbage collector finds, whenever it
    comes, keeps its number."""

    __slots__ = ("used",)

    def __init__(self):
        self.used = {}

    def take(self, name):
        used = self.used.setdefault(name, set())
        number = next(n for n in itertools.count(1) if n not in used) if used else 1
        used.add(number)
        return number

    def give_back(self, name, number):
        if not collecting[0]:
            self.used.get(name, set()).discard(number)


_numbers = Numbers()


def note(module):
    key = id(module)
    if key in modules:
        return
    kind = type(module).__name__
    number = _numbers.take(kind)

    modules[key] = weakref.ref(module, unless_at_the_end(_gone, key, kind, number)), number
    fresh[key] = None


def _gone(key, kind, number):
    modules.pop(key, None)
    fresh.pop(key, None)
    _numbers.give_back(kind, number)


def _copied(original, registered, failed):
    """In place of Module.__setstate__: a copy (copy.deepcopy, pickle) is made without a word to any hook."""
    @functools.wraps(original)
    def __setstate__(self, state):
        original(self, state)
        try:
            if self._parameters or self._buffers:
                note(self)
            for name, child in self._modules.items():
                registered(self, name, child)
        except Exception as error:
            failed("the copying of a module", error)

    return __setstate__


def _collects(phase, info, collecting=collecting):
    collecting[0] = phase == "start"


def install(module_class, registered, failed):
    gc.callbacks.append(_collects)
    module_class.__setstate__ = _copied(module_class.__setstate__, registered, failed)
