"""Learner workers on Ray: each on a node with free resources. Gradients of a process group go by gloo's sockets."""

import importlib
from collections.abc import Sequence
from typing import cast

import msgspec
import ray

from qfleet.build.custom_parts import NO_CUSTOM_PARTS, CustomParts
from qfleet.data import Spec
from qfleet.distributed.learners.launcher import ShardGroup, form_gloo_group, make_setup
from qfleet.distributed.learners.messages import FormGroup, LearnerReply, LearnerRequest
from qfleet.distributed.learners.worker import LearnerSetup, LearnerWorker, join_group
from qfleet.distributed.ray.parameter_server import RayPort, RayShards, find_shard
from qfleet.distributed.ray.worker import launch_on_ray
from qfleet.distributed.worker.handle import WorkerHandle
from qfleet.learn import Learner
from qfleet.plan.schema import Plan, RayRuntime
from qfleet.plan.sync_schema import Serving
from qfleet.sync.comm import Comm
from qfleet.sync.gradient_rule import shard_bounds
from qfleet.sync.process_groups import make_rendezvous_store
from qfleet.sync.served import ShardConnection


def make_learner_worker(setup: LearnerSetup) -> LearnerWorker:
    """The learner worker in its process."""
    return LearnerWorker(setup, RayPeerConnections)


class RayPeerConnections:
    """A learner worker's connections: gloo between nodes, and calls to shards found by name."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        importlib.import_module("torch.distributed")  # now, while no group waits for this process

    def join(self, request: FormGroup) -> Comm:
        """Join the process group that the request describes."""
        return join_group(self.plan, request, ray.util.get_node_ip_address())

    def connect_shards(self, sync_plan: Serving, learner: Learner, request: FormGroup) -> Sequence[ShardConnection]:
        """Connect to the shards that the request names."""
        bounds = shard_bounds(sum(weight.numel() for weight in learner.parameters), sync_plan.shards)
        sizes = [end - begin for begin, end in bounds]
        limit = self.plan.learners.timeout_seconds
        return [
            RayPort(find_shard(name), request.rank, num, limit) for name, num in zip(request.shards, sizes, strict=True)
        ]

    def disconnect_shards(self) -> None:
        """Calls need not be closed."""


class RayLearnerLauncher:
    """Starts learner workers and shards on any node with free resources."""

    replaces = True

    def __init__(self, plan: Plan, env_spec: Spec, spec: Spec, custom_parts: CustomParts = NO_CUSTOM_PARTS) -> None:
        self.plan = plan
        self.env_spec = env_spec
        self.spec = spec
        self.custom_parts = custom_parts
        self.address = ray.util.get_node_ip_address()
        self.store = make_rendezvous_store(self.address)

    def launch(self, number: int, incarnation: int) -> WorkerHandle:
        """Start a learner worker; Ray finds a node for it."""
        setup = make_setup(self.plan, self.env_spec, self.spec, number, incarnation, self.custom_parts)
        cpus = cast(RayRuntime, self.plan.runtime).learner_cpus
        return launch_on_ray(
            "Learner", make_learner_worker, setup, LearnerRequest, LearnerReply, number=number, cpus=cpus
        )

    def form_group(self, members: Sequence[WorkerHandle], request: FormGroup, learner: Learner) -> Comm:
        """Form the group with gloo, at this process's store."""
        request = msgspec.structs.replace(request, address=self.address, port=self.store.port)
        return form_gloo_group(self.plan, members, request, self.address)

    def start_server(self, sync_plan: Serving, learner: Learner) -> ShardGroup:
        """Start a process for each shard."""
        return RayShards(self.plan, sync_plan, learner)
