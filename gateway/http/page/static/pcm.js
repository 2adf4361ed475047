// Speech on its way from base64 to samples.

export const RATE = 24000;

/** Reads base64 of 16-bit samples, piece by piece; a piece may end within a sample. */
export class PcmReader {
  #rest = new Uint8Array(0);

  /** @returns {Float32Array} the samples that are complete */
  read(base64) {
    const text = atob(base64);
    const bytes = new Uint8Array(this.#rest.length + text.length);
    bytes.set(this.#rest);
    for (let i = 0, at = this.#rest.length; i < text.length; i++, at++) bytes[at] = text.charCodeAt(i);
    const count = bytes.length >> 1;
    this.#rest = bytes.slice(2 * count);
    const view = new DataView(bytes.buffer);
    return Float32Array.from({ length: count }, (_, i) => view.getInt16(2 * i, true) / 32768);
  }
}

/** The pieces in one. */
export function join(pieces) {
  const whole = new Float32Array(pieces.reduce((sum, piece) => sum + piece.length, 0));
  let at = 0;
  for (const piece of pieces) {
    whole.set(piece, at);
    at += piece.length;
  }
  return whole;
}
