"""``/v1/realtime/calls``: sessions over WebRTC, by aiortc, which is installed with the extra ``webrtc``."""
