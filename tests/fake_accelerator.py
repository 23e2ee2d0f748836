"""An accelerator that is not there, for tests of what is called."""

import torch

from loopkit.base import devices


class Fake:
    """An accelerator that is not there, with a record of what it was asked for."""

    def __init__(self, monkeypatch, kind="cuda", count=2):
        self.calls, self.current = [], 0
        found = torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "set_device_index", self.set_device)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"stream of {device}")
        monkeypatch.setattr(devices, "Event", self.event)
        monkeypatch.setattr(torch.get_device_module(kind), "current_device", lambda: self.current, raising=False)

    def set_device(self, index):
        self.current = index
        self.calls.append(f"current {index}")

    def joins_by_gloo(self, monkeypatch):
        """Let processes join as if its backend were there, which none of them has."""
        join = torch.distributed.init_process_group

        def init(backend, *, device_id=None, **options):
            self.calls.append(f"join by {backend} as {device_id}")
            join("gloo", **options)

        monkeypatch.setattr(torch.distributed, "init_process_group", init)
        monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: True)

    def event(self, device, enable_timing=False):
        return _Event(self.calls, device)


class _Event:
    def __init__(self, calls, device):
        self.calls, self.device = calls, device

    def record(self, stream):
        self.calls.append(f"event of {self.device} on {stream}")

    def query(self):
        return True

    def synchronize(self):
        self.calls.append(f"wait for {self.device}")
