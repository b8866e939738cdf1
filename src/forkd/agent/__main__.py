from forkd.agent.main import main

main()
