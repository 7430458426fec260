//go:build unix

package dbtest

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
)

// Tap records each command that a client sends over connections which were opened
// by its Dial, a mysql.Config's DialFunc. It can break them, hold up what is sent
// on them, answer in the server's place, and refuse new ones. The zero value is ready
// to use. For a network that fails below the client, see Proxy.
type Tap struct {
	mu      sync.Mutex
	log     []Command
	opened  int
	open    map[*tapped]struct{}
	refuses bool

	stall   string        // the answer to a statement that begins so
	stalled chan struct{} // does not arrive before this is closed

	late     string        // a statement that begins so
	let      chan struct{} // does not reach the server before this is closed
	lateDone chan struct{} // closed when the server has carried it out

	fault  *Fault
	struck int           // how often it has happened
	frozen chan struct{} // nothing passes before this is closed; nil if nothing is held up
}

// Fault is what happens to a statement on its way to the server.
type Fault struct {
	Times  int                    // to how many of them; 0 is one
	At     func(text string) bool // which statement: also for one that was prepared before, by its SQL
	Before func()                 // runs before it is sent; nil is nothing
	Answer error                  // a *mysql.MySQLError that answers it in the server's place: it is not sent
	Lost   bool                   // the connection breaks in place of the server's answer
}

// Command is what a client has sent.
type Command struct {
	Conn int    // which connection, counted from 1
	Text string // the SQL, for a statement that is prepared behind "[prepare] ", or else the command's name in brackets
	Of   string // the SQL of the prepared statement that is executed
}

// Dial opens a connection.
func (t *Tap) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	t.mu.Lock()
	refuses := t.refuses
	t.mu.Unlock()
	if refuses {
		return nil, errors.New("the test refuses connections")
	}
	if frost := t.frost(); frost != nil {
		select {
		case <-frost:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	conn, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.opened++
	c := &tapped{Conn: conn, tap: t, n: t.opened, gone: make(chan struct{})}
	if t.open == nil {
		t.open = make(map[*tapped]struct{})
	}
	t.open[c] = struct{}{}
	return c, nil
}

// On, for Database.Connect, has connections opened by Dial.
func (t *Tap) On(cfg *mysql.Config) { cfg.DialFunc = t.Dial }

// Opened returns how many connections were opened so far.
func (t *Tap) Opened() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.opened
}

// Since returns a function that tells which commands were sent from now on.
func (t *Tap) Since() func() []Command {
	t.mu.Lock()
	defer t.mu.Unlock()
	from := len(t.log)
	return func() []Command {
		t.mu.Lock()
		defer t.mu.Unlock()
		return slices.Clone(t.log[from:])
	}
}

// Texts is Since for the texts of statements, those that are prepared included.
func (t *Tap) Texts() func() []string {
	since := t.Since()
	return func() (texts []string) {
		for _, c := range since() {
			if !strings.HasPrefix(c.Text, "[") || strings.HasPrefix(c.Text, "[prepare] ") {
				texts = append(texts, c.Text)
			}
		}
		return texts
	}
}

// Costs runs f once, so that rows and connections are there, and counts the commands
// of the next time. On a busy machine what follows a release may come later than
// usual, and what keeps a connection in between: it counts again then.
func (t *Tap) Costs(tb testing.TB, what string, want int, f func() error) {
	tb.Helper()
	OK(tb, f())
	const last = 25
	for round := time.Duration(1); ; round++ {
		time.Sleep(round * 5 * time.Millisecond)
		since := t.Since()
		OK(tb, f())
		time.Sleep(round * 5 * time.Millisecond)
		log := since()
		if len(log) == want {
			return
		}
		if round == last {
			tb.Errorf("%s: %d statements, want %d: %v", what, len(log), want, log)
			return
		}
	}
}

// Stall keeps back the answer to the next statement that begins so. The function
// that it returns lets it arrive.
func (t *Tap) Stall(begin string) (arrive func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.stall, t.stalled = begin, make(chan struct{})
	return sync.OnceFunc(func() { close(t.stalled) })
}

// Delay keeps the next statement that begins so from the server, although its client
// has sent it, and may close its connection. The function that it returns lets it
// arrive, and waits until the server has carried it out.
func (t *Tap) Delay(begin string) (arrive func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.late, t.let, t.lateDone = begin, make(chan struct{}), make(chan struct{})
	let, done := t.let, t.lateDone
	return sync.OnceFunc(func() { close(let); <-done })
}

// Strike has f happen to the next statements that it is for. The function that it returns
// reports whether it has happened to any.
func (t *Tap) Strike(f Fault) (happened func() bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.fault, t.struck = &f, 0
	return func() bool {
		t.mu.Lock()
		defer t.mu.Unlock()
		return t.struck > 0
	}
}

// Freeze holds up all that is sent, both ways, as while the client's host stands still. The
// function that it returns ends it.
func (t *Tap) Freeze() (thaw func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.frozen = make(chan struct{})
	return sync.OnceFunc(func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		close(t.frozen)
		t.frozen = nil
	})
}

// frost returns what is closed when nothing is held up any more; nil if nothing is.
func (t *Tap) frost() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.frozen
}

// Cut breaks all connections, and refuses new ones until Mend.
func (t *Tap) Cut() {
	t.refuse(true)
	t.Break()
}

// Mend ends what Cut has begun.
func (t *Tap) Mend() { t.refuse(false) }

func (t *Tap) refuse(refuses bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.refuses = refuses
}

// Break breaks the connections there are.
func (t *Tap) Break() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for c := range t.open {
		c.once.Do(func() { close(c.gone) })
		c.Conn.Close()
	}
}

// tapped is a connection of a Tap. What is not said otherwise is guarded by the
// Tap's mutex.
type tapped struct {
	net.Conn
	tap     *Tap
	n       int
	gone    chan struct{} // closed when the client has closed it, or Break has
	once    sync.Once
	stalled <-chan struct{}
	late    bool // a statement is under way that arrives late

	deadline time.Time // of reads

	preparing string // what the next answer is about, "" if it is about no statement to prepare
	prepared  map[uint32]string

	answer []byte // in the server's place
	loses  bool   // the next answer
}

func (t *tapped) Read(b []byte) (int, error) {
	t.tap.mu.Lock()
	stalled, answer := t.stalled, t.answer
	t.answer = nil
	t.tap.mu.Unlock()
	if answer != nil {
		return copy(b, answer), nil
	}
	if err := t.await(stalled); err != nil {
		return 0, err
	}
	t.tap.mu.Lock()
	late, loses := t.late, t.loses
	t.tap.mu.Unlock()
	if late {
		return 0, net.ErrClosed
	}
	n, err := t.Conn.Read(b)
	if loses {
		t.Conn.Close()
		return 0, net.ErrClosed
	}
	if held := t.await(t.tap.frost()); held != nil {
		return 0, held
	}
	t.answered(b[:n])
	return n, err
}

// await waits until what holds up an answer is closed, the client has closed the
// connection, or its deadline is over.
func (t *tapped) await(stalled <-chan struct{}) error {
	if stalled == nil {
		return nil
	}
	t.tap.mu.Lock()
	deadline := t.deadline
	t.tap.mu.Unlock()
	var over <-chan time.Time
	if !deadline.IsZero() {
		over = time.After(time.Until(deadline))
	}
	select {
	case <-stalled:
	case <-t.gone:
	case <-over:
		return os.ErrDeadlineExceeded
	}
	return nil
}

// answered notes the number of a statement that was prepared.
func (t *tapped) answered(b []byte) {
	t.tap.mu.Lock()
	defer t.tap.mu.Unlock()
	if t.preparing != "" && len(b) >= 9 && b[4] == 0 {
		if t.prepared == nil {
			t.prepared = make(map[uint32]string)
		}
		t.prepared[binary.LittleEndian.Uint32(b[5:])] = t.preparing
	}
	t.preparing = ""
}

func (t *tapped) SetReadDeadline(deadline time.Time) error {
	t.tap.mu.Lock()
	t.deadline = deadline
	t.tap.mu.Unlock()
	return t.Conn.SetReadDeadline(deadline)
}

func (t *tapped) Write(b []byte) (int, error) {
	late, fault := t.record(b)
	if fault != nil && fault.Before != nil {
		fault.Before()
	}
	if late || fault != nil && fault.Answer != nil {
		return len(b), nil
	}
	if frost := t.tap.frost(); frost != nil {
		select {
		case <-frost:
		case <-t.gone:
			return 0, net.ErrClosed
		}
	}
	return t.Conn.Write(b)
}

// record notes what is sent, and returns whether it is to arrive late, and what else
// happens to it.
func (t *tapped) record(b []byte) (late bool, fault *Fault) {
	text := command(b)
	if text == "" {
		return false, nil
	}
	tap := t.tap
	tap.mu.Lock()
	defer tap.mu.Unlock()
	of := ""
	if text == "[execute]" && len(b) >= 9 {
		of = t.prepared[binary.LittleEndian.Uint32(b[5:])]
	}
	if sql, ok := strings.CutPrefix(text, "[prepare] "); ok {
		t.preparing = sql
	}
	tap.log = append(tap.log, Command{t.n, text, of})
	begins := func(begin string) bool {
		return begin != "" && (strings.HasPrefix(text, begin) || strings.HasPrefix(of, begin))
	}
	if begins(tap.stall) {
		t.stalled, tap.stall = tap.stalled, ""
	}
	if f := tap.fault; f != nil && f.At(cmp.Or(of, text)) {
		if fault, f.Times = f, f.Times-1; f.Times <= 0 {
			tap.fault = nil
		}
		tap.struck++
		t.loses = f.Lost
		if refused := (*mysql.MySQLError)(nil); errors.As(f.Answer, &refused) {
			t.answer = packet(refused)
		}
	}
	if !begins(tap.late) {
		return false, fault
	}
	tap.late, t.late = "", true
	t.stalled = t.gone // the answer does not arrive either
	go t.arrive(bytes.Clone(b), tap.let, tap.lateDone)
	return true, fault
}

// packet is the answer of a server that refuses a statement.
func packet(err *mysql.MySQLError) []byte {
	body := binary.LittleEndian.AppendUint16([]byte{0xff}, err.Number)
	body = append(body, "#HY000"+err.Message...)
	return append([]byte{byte(len(body)), byte(len(body) >> 8), 0, 1}, body...)
}

// arrive sends a statement whose client has gone.
func (t *tapped) arrive(b []byte, let <-chan struct{}, done chan<- struct{}) {
	<-let
	if _, err := t.Conn.Write(b); err == nil {
		_, _ = t.Conn.Read(make([]byte, 1))
	}
	t.Conn.Close()
	close(done)
}

// command is what a packet of a client says, "" where it begins no command.
func command(b []byte) string {
	if len(b) <= 4 || b[3] != 0 { // a command has sequence number 0
		return ""
	}
	switch b[4] {
	case 1:
		return "[quit]"
	case 3:
		return string(b[5:])
	case 14:
		return "[ping]"
	case 22:
		return "[prepare] " + string(b[5:])
	case 23:
		return "[execute]"
	case 25:
		return "[close]"
	}
	return fmt.Sprintf("[command %d]", b[4])
}

func (t *tapped) Close() error {
	t.tap.mu.Lock()
	delete(t.tap.open, t)
	late := t.late
	t.tap.mu.Unlock()
	t.once.Do(func() { close(t.gone) })
	if late {
		return nil
	}
	return t.Conn.Close()
}

// SyscallConn lets the driver see that an idle connection is dead.
func (t *tapped) SyscallConn() (syscall.RawConn, error) { return t.Conn.(syscall.Conn).SyscallConn() }
