package mysqllock

import (
	"crypto/rand"
	"database/sql/driver"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/socket"
)

// connectorsOf makes the connectors of a handle. cfg is what the application wants of connections; ours differ from
// it in the two columns of the table.
func connectorsOf(cfg *mysql.Config, c Config, ttl time.Duration) (handle.Connectors, error) {
	// Waiting is no failure on the driver's own connections, and contexts limit it. Beside that there is
	// a limit where leases and advisory locks wait: with it a statement there needs no context, and costs less.
	const unlimited, ofLeases = 0, 10 * time.Second
	ofAdvisory := min(ttl-ttl/10, 5*time.Second)
	if cfg.ReadTimeout > 0 {
		ofAdvisory = min(ofAdvisory, cfg.ReadTimeout)
	}
	all := handle.Connectors{
		App:         handle.Connector{Several: cfg.MultiStatements, ReadTimeout: cfg.ReadTimeout},
		Session:     handle.Connector{Several: true, ReadTimeout: cfg.ReadTimeout},
		Control:     handle.Connector{Several: false, ReadTimeout: unlimited},
		Advisory:    handle.Connector{Several: false, ReadTimeout: ofAdvisory},
		LeaseSingly: handle.Connector{Several: false, ReadTimeout: ofLeases},
		Lease:       handle.Connector{Several: true, ReadTimeout: ofLeases},
	}
	for _, of := range all.All() {
		own := cfg.Clone()
		own.MultiStatements, own.ReadTimeout = of.Several, of.ReadTimeout
		base, err := mysql.NewConnector(own)
		if err != nil {
			return all, err
		}
		if of.Connector, err = c.wrapBase(base); err != nil {
			return all, err
		}
	}
	return all, nil
}

// wrapBase returns what Config.Base makes of a connector.
func (c Config) wrapBase(base driver.Connector) (driver.Connector, error) {
	if c.Base == nil {
		return base, nil
	}
	above, err := c.Base(base)
	if err != nil {
		return nil, fmt.Errorf("mysqllock: Config.Base: %w", err)
	}
	if above == nil {
		return nil, errors.New("mysqllock: Config.Base has returned no connector")
	}
	return above, nil
}

// ownerAttribute is the connection attribute by which a server that shows
// attributes (MySQL, in performance_schema.session_connect_attrs) names a
// holder to those who wait for it.
const ownerAttribute = "mysqllock_owner"

// budgetAttribute is the connection attribute by which `mysqllock doctor` adds up what all
// handles may open: maxConns, and a name that all connections of the handle share.
const budgetAttribute = "mysqllock_budget"

// describe adds the connection attributes of a handle.
func describe(cfg *mysql.Config, s handle.Settings) {
	if !strings.Contains(cfg.ConnectionAttributes, ownerAttribute+":") {
		addAttribute(cfg, ownerAttribute, s.Owner)
	}
	if s.MaxConns > 0 {
		addAttribute(cfg, budgetAttribute, fmt.Sprintf("%d of %s", s.MaxConns, rand.Text()[:8]))
	}
}

func addAttribute(cfg *mysql.Config, name, value string) {
	if cfg.ConnectionAttributes != "" {
		cfg.ConnectionAttributes += ","
	}
	cfg.ConnectionAttributes += name + ":" + strings.ReplaceAll(value, ",", ";")
}

// seeSockets lets the budget of connections see when one has ended, unless they go over a
// network that the application has registered: then they have ended when they are closed.
func seeSockets(cfg *mysql.Config) {
	switch {
	case cfg.DialFunc != nil:
		cfg.DialFunc = socket.Dial(cfg.DialFunc)
	case slices.Contains([]string{"tcp", "tcp4", "tcp6", "unix"}, cfg.Net):
		cfg.DialFunc = socket.Dial(new(net.Dialer).DialContext)
	}
}
