package socket

import (
	"bytes"
	"encoding/binary"
)

// greeting finds the connection's id in the first packet that the server sends, before any TLS.
type greeting struct {
	received []byte
	done     bool
}

// read is called with all that arrives. It returns the id once, when it is there, and else 0.
func (g *greeting) read(b []byte) (id uint32) {
	const header, longest = 4, 256 // the id comes after the protocol's number and the server's version
	if g.done {
		return 0
	}
	g.received = append(g.received, b[:min(len(b), longest-len(g.received))]...)
	if len(g.received) > header && g.received[header] == 10 {
		_, rest, found := bytes.Cut(g.received[header+1:], []byte{0})
		if found && len(rest) >= 4 {
			id = binary.LittleEndian.Uint32(rest)
		}
	}
	if id != 0 || len(g.received) == longest {
		g.received, g.done = nil, true
	}
	return id
}
