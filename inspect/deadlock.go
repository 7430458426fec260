package inspect

import (
	"context"
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"strings"

	"github.com/mysqllock/mysqllock/internal/keyrow"
)

// Deadlock is the last one that InnoDB has broken: of rows of any table.
type Deadlock struct {
	Time  string // as the server writes it, in its time zone
	Sides []Side
}

// Side is a transaction of a Deadlock.
type Side struct {
	ConnectionID uint64 `json:"connection_id,omitempty"`
	Account      string `json:"account,omitempty"`   // user@host
	Statement    string `json:"statement,omitempty"` // that waited, with ? for its values
	WaitsFor     string `json:"waits_for,omitempty"` // the key of the lock, or the table and the index of another row
	Holds        string `json:"holds,omitempty"`     // likewise; "" if the server does not tell it
	RolledBack   bool   `json:"rolled_back,omitempty"`
}

// String says what the side held and wanted.
func (s Side) String() string {
	text := fmt.Sprintf("connection %d (%s)", s.ConnectionID, s.Account)
	if s.Holds != "" {
		text += ", which held " + s.Holds
	}
	text += ", waited for " + s.WaitsFor
	if s.Statement != "" {
		text += " by " + s.Statement
	}
	if s.RolledBack {
		text += ", and was rolled back"
	}
	return text
}

var (
	deadlockPart   = regexp.MustCompile(`(?s)LATEST DETECTED DEADLOCK\n-+\n(\S+ \S+).*?\n(.*?)\n-{4,}\nTRANSACTIONS\n`)
	deadlockSide   = regexp.MustCompile(`(?m)^\*\*\* \((\d+)\) TRANSACTION:\n`)
	deadlockVictim = regexp.MustCompile(`WE ROLL BACK TRANSACTION \((\d+)\)`)
	deadlockThread = regexp.MustCompile(`(?m)^(?:MySQL|MariaDB) thread id (\d+), .*?query id \d+ (.*)$`)
	deadlockTable  = regexp.MustCompile("index (\\S+) of table (`.*`\\.`.*?`)")
	deadlockField  = regexp.MustCompile(`(?m)^ ([01]): len \d+; hex ([0-9a-f]*);`)
)

// LatestDeadlock reads which deadlock InnoDB has broken last, with what each side held and wanted. It is nil if
// there was none, or if the account has no PROCESS, without which the server does not tell.
func (i *Inspector) LatestDeadlock(ctx context.Context) (d *Deadlock, err error) {
	err = i.on(ctx, func(ctx context.Context, s *session) error {
		rows, err := s.query(ctx, "SHOW ENGINE INNODB STATUS")
		if hidden(err) || err == nil && (len(rows) == 0 || len(rows[0]) < 3) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("mysqllock: reading the latest deadlock: %w", err)
		}
		d = s.readDeadlock(rows[0][2])
		return nil
	})
	return d, err
}

// readDeadlock reads the part of InnoDB's status that is about the latest deadlock.
func (s *session) readDeadlock(status string) *Deadlock {
	part := deadlockPart.FindStringSubmatch(status)
	if part == nil {
		return nil
	}
	d, text := &Deadlock{Time: part[1]}, part[2]
	victim := ""
	if m := deadlockVictim.FindStringSubmatch(text); m != nil {
		victim = m[1]
	}
	starts := deadlockSide.FindAllStringSubmatchIndex(text, -1)
	for n, at := range starts {
		end := len(text)
		if n+1 < len(starts) {
			end = starts[n+1][0]
		}
		side := s.readSide(text[at[1]:end])
		side.RolledBack = text[at[2]:at[3]] == victim
		d.Sides = append(d.Sides, side)
	}
	return d
}

// readSide reads what the status says of one transaction: it, then parts that begin with "***".
func (s *session) readSide(text string) (side Side) {
	parts := strings.Split(text, "\n*** ")
	head := parts[0]
	if m := deadlockThread.FindStringSubmatchIndex(head); m != nil {
		side.ConnectionID, _ = strconv.ParseUint(head[m[2]:m[3]], 10, 64)
		side.Account = accountOf(strings.Fields(head[m[4]:m[5]]))
		side.Statement = masked(head[m[1]:])
		if len(side.Statement) > longestText {
			side.Statement = side.Statement[:longestText]
		}
	}
	for _, part := range parts[1:] {
		switch {
		case strings.Contains(part, "WAITING FOR THIS LOCK"):
			side.WaitsFor = s.lockOf(part)
		case strings.Contains(part, "HOLDS THE LOCK"):
			side.Holds = s.lockOf(part)
		}
	}
	return side
}

// accountOf reads the host, perhaps an address, and the user, which are followed by what the connection does.
func accountOf(words []string) string {
	if len(words) < 2 {
		return ""
	}
	user := words[1]
	if _, err := netip.ParseAddr(user); err == nil && len(words) > 2 {
		user = words[2]
	}
	return user + "@" + words[0]
}

// lockOf is the key whose row the part is about, or the table.
func (s *session) lockOf(part string) string {
	m := deadlockTable.FindStringSubmatch(part)
	if m == nil {
		return "a lock of a table"
	}
	fields := deadlockField.FindAllStringSubmatch(part, 2)
	if m[2] != s.table.String() || len(fields) < 2 {
		return "a row of " + m[2] + " (" + m[1] + ")"
	}
	namespace, _ := unhex("0x" + fields[0][2])
	name, _ := unhex("0x" + fields[1][2])
	row, ok := keyrow.Read(name)
	if !ok || row.Key == "" {
		return strconv.Quote(name)
	}
	if namespace != s.namespace {
		return strconv.Quote(row.Key) + " of namespace " + strconv.Quote(namespace)
	}
	return strconv.Quote(row.Key)
}
