"""Build workflows in plain Python: nodes that are tasks, maps over lists, groups, and the run that comes of them."""

from unstuck.client.workflows.builder import Group as Group
from unstuck.client.workflows.builder import Workflow as Workflow
from unstuck.client.workflows.builder import WorkflowRun as WorkflowRun
from unstuck.client.workflows.nodes import Node as Node
