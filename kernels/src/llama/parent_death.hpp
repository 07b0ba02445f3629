// A router engine ends with its agent, whatever kills the agent.
#pragma once

namespace swarm {

// When SWARM_PARENT_PID is set: ends this process as soon as that process is no longer its parent.
void end_with_parent();

}  // namespace swarm
