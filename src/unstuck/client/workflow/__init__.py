"""Build workflows in plain Python: nodes that are tasks, maps over lists, groups, and the run that comes of them."""

from unstuck.client.workflow.nodes import Node as Node
from unstuck.client.workflow.run import WorkflowRun as WorkflowRun
from unstuck.client.workflow.scopes import Group as Group
from unstuck.client.workflow.scopes import Workflow as Workflow
