"""A LiveKit agent that talks: OmniRelay is its realtime model.

pip install "livekit-agents[openai]"
python livekit_agent.py console   # with this machine's microphone
python livekit_agent.py dev       # in rooms of LIVEKIT_URL, where LiveKit's SIP service brings calls
"""

import os

from livekit.agents import Agent, AgentServer, AgentSession, JobContext, cli
from livekit.plugins import openai

server = AgentServer()


def voice_session() -> AgentSession:
    """Make a session that hears and speaks by one model."""
    model = openai.realtime.RealtimeModel(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        model="omnirelay",
    )
    return AgentSession(llm=model)


def agent() -> Agent:
    """Make the agent."""
    return Agent(instructions="You are a helpful assistant. Answer in short sentences.")


@server.rtc_session()
async def answer(job: JobContext) -> None:
    """Talk to whoever is in the room."""
    await voice_session().start(agent=agent(), room=job.room)


if __name__ == "__main__":
    cli.run_app(server)
